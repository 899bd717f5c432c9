package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// mountConfig is one mount as the command line has it.
type mountConfig struct {
	source     source
	mountpoint string // absolute
	options    mountOptions
}

// readyFD is where a serving process started by `weft mount` says how mounting went: nothing but end of file for
// success, otherwise one line.
const readyFD = 3

// readyEnv marks a process that has readyFD.
const readyEnv = "WEFT_READY_FD"

func runMount(ctx context.Context, c *command, args []string) error {
	fl := c.flags(optionsHelp())
	foreground := fl.BoolP("foreground", "f", false, "serve in the foreground until unmounted")
	lists := fl.StringArrayP("options", "o", nil, "options, see below")
	if err := c.parse(fl, args, 2, 2); err != nil {
		return err
	}
	cfg, err := newMountConfig(fl.Arg(0), fl.Arg(1), *lists)
	if err != nil {
		return usagef("mount: %v", err)
	}
	if err := checkMountpoint(cfg.mountpoint); err != nil {
		return mountErr(err)
	}
	if *foreground {
		return mountErr(serveMount(ctx, cfg))
	}
	return mountErr(startServer(cfg, args))
}

func newMountConfig(src, mountpoint string, lists []string) (mountConfig, error) {
	s, err := parseSource(src)
	if err != nil {
		return mountConfig{}, err
	}
	opts, err := parseOptions(lists)
	if err != nil {
		return mountConfig{}, err
	}
	abs, err := filepath.Abs(mountpoint)
	if err != nil {
		return mountConfig{}, err
	}
	// A mount point below a symbolic link is shown by the kernel where it really is. One that is missing or does not
	// answer is for checkMountpoint to explain.
	if real, err := cleanMountpoint(abs); err == nil {
		abs = real
	}
	return mountConfig{s, abs, opts}, nil
}

// checkMountpoint refuses what cannot be mounted on. A directory that is not empty is allowed, as mount(8) does.
func checkMountpoint(path string) error {
	list, err := weftMounts()
	if err != nil {
		return err
	}
	for _, m := range list {
		if m.Mountpoint == path {
			return fmt.Errorf("mount point %s is already a weft mount of %s; unmount it first: weft umount %s", path, m.Source, path)
		}
	}
	var st unix.Stat_t
	switch err := unix.Stat(path, &st); {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("mount point %s does not exist; make it: mkdir -p %s", path, path)
	case errors.Is(err, unix.ENOTCONN):
		return fmt.Errorf("mount point %s is a mount whose serving process has died; free it: umount -l %s", path, path)
	case err != nil:
		return fmt.Errorf("mount point %s: %w", path, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("mount point %s is not a directory", path)
	}
	return nil
}

// logFile is where the serving process writes: as the options say, or a file named for the mount point.
func (cfg mountConfig) logFile() string {
	if cfg.options.log != "" {
		return cfg.options.log
	}
	dir := "/var/log/weft"
	if os.Getuid() != 0 {
		dir = filepath.Join(controlDir(os.Getuid()), "log")
	}
	name := strings.ReplaceAll(strings.Trim(cfg.mountpoint, "/"), "/", "-")
	return filepath.Join(dir, name+".log")
}

// startServer starts this program again as the serving process, in a session of its own and without the caller's
// terminal and pipes, and waits until the mount is usable.
func startServer(cfg mountConfig, args []string) error {
	name := cfg.logFile()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return fmt.Errorf("log file: %w (choose another with -o log=FILE)", err)
	}
	log, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("log file: %w (choose another with -o log=FILE)", err)
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	server := exec.Command(self, append([]string{"mount", "-f"}, args...)...)
	server.Env = append(os.Environ(), readyEnv+"=1")
	server.Stdout, server.Stderr = log, log
	server.ExtraFiles = []*os.File{w}
	server.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = server.Start()
	w.Close()
	if err != nil {
		return err
	}
	said, err := bufio.NewReader(r).ReadString('\n')
	if said = strings.TrimSpace(said); said != "" {
		server.Wait()
		return errors.New(said)
	}
	if err != io.EOF {
		return err
	}
	if m, err := mountAt(cfg.mountpoint); err != nil {
		// The pipe also closes when the process dies.
		state, _ := server.Process.Wait()
		return fmt.Errorf("the serving process ended (%v) before %s was usable; its log is %s", state, cfg.mountpoint, name)
	} else if m.Source != cfg.source.String() {
		return fmt.Errorf("something else was mounted on %s meanwhile: %s", cfg.mountpoint, m.Source)
	}
	return server.Process.Release()
}

// ready tells whoever started this process how mounting went. It does nothing in the foreground.
func ready(err error) {
	if os.Getenv(readyEnv) == "" {
		return
	}
	os.Unsetenv(readyEnv)
	f := os.NewFile(readyFD, "ready")
	if err != nil {
		fmt.Fprintln(f, strings.ReplaceAll(err.Error(), "\n", " "))
	}
	f.Close()
}

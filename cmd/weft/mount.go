package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/cli"
	"github.com/weftfs/weft/internal/filename"
)

// mountConfig is one mount as the command line has it.
type mountConfig struct {
	source     source
	name       string // of the source as it was given: what the kernel shows has to be what fstab(5) says, or mount -a mounts again
	mountpoint string // absolute
	options    mountOptions
	own        []string // weft's own options as they were given
	readyFD    int      // of --ready-fd; 0: none
	readyFile  string   // of --ready-file; "": none
}

// readyFD is where a serving process started by `weft mount` says how mounting went: nothing but end of file for
// success, otherwise one line. One that begins with inBackground says why mounting takes longer, and is no failure.
const readyFD = 3

const inBackground = "background: "

// backgroundError is why a mount with the option bg is tried again.
type backgroundError struct{ error }

// readyEnv marks a process that has readyFD.
const readyEnv = "WEFT_READY_FD"

func runMount(ctx context.Context, c *command, args []string) error {
	fl := c.Flags(optionsHelp())
	foreground := fl.BoolP("foreground", "f", false, "serve in the foreground until unmounted")
	readyFD := fl.Int("ready-fd", 0, "with -f: descriptor that gets a line when the mount can be used, and is closed")
	readyFile := fl.String("ready-file", "", "with -f: `FILE` that is there while the mount can be used")
	lists := fl.StringArrayP("options", "o", nil, "`OPTION`s, separated by commas, see below")
	if err := parse(c, fl, args, 2, 2); err != nil {
		return err
	}
	switch {
	case !*foreground && (*readyFD != 0 || *readyFile != ""):
		return usagef("mount: --ready-fd and --ready-file are for a mount in the foreground (-f); without it the command returns when the mount can be used")
	case fl.Changed("ready-fd") && *readyFD < 1:
		return usagef("mount: --ready-fd %d: want the number of an open descriptor", *readyFD)
	}
	cfg, err := newMountConfig(fl.Arg(0), fl.Arg(1), *lists)
	if err != nil {
		return usagef("mount: %v", err)
	}
	if cfg.options.remount {
		return mountErr(remount(ctx, cfg, false))
	}
	if err := checkMountpoint(cfg.mountpoint); err != nil {
		return mountErr(err)
	}
	if *foreground {
		cfg.readyFD, cfg.readyFile = *readyFD, *readyFile
		return mountErr(serveMount(ctx, cfg))
	}
	return mountErr(startServer(ctx, cfg, args))
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
	// The kernel shows a mount point where it really is. One that is missing is for checkMountpoint to explain.
	if real, err := cleanMountpoint(abs); err == nil {
		abs = real
	}
	return mountConfig{source: s, name: src, mountpoint: abs, options: opts, own: ownOptions(optionWords(lists))}, nil
}

// check looks at the files that options name, as the serving process will.
func (cfg mountConfig) check() error {
	if _, _, err := cfg.options.secrecy.clients(); err != nil {
		return err
	}
	_, err := readSecrets(cfg.options.secrets)
	return err
}

// checkMountpoint refuses what cannot be mounted on. A directory that is not empty is allowed, as mount(8) does.
func checkMountpoint(path string) error {
	shown := filename.Quote(path)
	list, err := weftMounts()
	if err != nil {
		return err
	}
	for _, m := range list {
		if m.Mountpoint == path {
			return fmt.Errorf("mount point %s is already a weft mount of %s; unmount it first: weft umount %s", shown, filename.Quote(m.Source), shown)
		}
	}
	var st unix.Stat_t
	switch err := unix.Stat(path, &st); {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("mount point %s does not exist; make it: mkdir -p %s", shown, shown)
	case errors.Is(err, unix.ENOTCONN):
		return fmt.Errorf("mount point %s is a mount whose serving process has died; free it: umount -l %s", shown, shown)
	case err != nil:
		return fmt.Errorf("mount point %s: %w", shown, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("mount point %s is not a directory", shown)
	}
	return nil
}

// defaultLog is where the process logs that serves a mount point for us.
func defaultLog(mountpoint string) string {
	dir := "/var/log/weft"
	if !hostRoot() {
		dir = filepath.Join(controlDirs(os.Getuid())[0], "log")
	}
	return filepath.Join(dir, strings.ReplaceAll(strings.Trim(mountpoint, "/"), "/", "-")+".log")
}

// openLog opens the file that the serving process logs to: as the options say, or one named for the mount point.
func (cfg mountConfig) openLog() (*os.File, error) {
	name := cfg.options.log
	if name == "" {
		if !hostRoot() {
			if _, err := privateDir(); err != nil {
				return nil, err
			}
		}
		name = defaultLog(cfg.mountpoint)
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return nil, fmt.Errorf("log file: %w (choose another with -o log=FILE)", err)
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("log file: %w (choose another with -o log=FILE)", err)
	}
	return f, nil
}

// startServer starts this program again as the serving process, without the caller's pipes and other descriptors, and waits until the mount is
// usable. Ending ctx ends it. Until it is mounted the process stays in the caller's process group: a mount point of autofs lets nobody pass
// whom its own process group has not sent (x-systemd.automount).
func startServer(ctx context.Context, cfg mountConfig, args []string) error {
	log, err := cfg.openLog()
	if err != nil {
		return err
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return cli.Exit(exitFailed, err)
	}
	defer r.Close()
	server := exec.Command("/proc/self/exe", append([]string{"mount", "-f"}, args...)...)
	server.Args[0] = "weft"
	server.Env = append(os.Environ(), readyEnv+"=1")
	server.Stdout, server.Stderr = log, log
	server.ExtraFiles = []*os.File{w}
	// A shell may have given us more than 0, 1 and 2, such as the lock file or the pipe that its own caller waits for.
	// Kernels before 5.11 cannot.
	if err := unix.CloseRange(readyFD, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("close_range: %w", err)
	}
	err = server.Start()
	w.Close()
	if err != nil {
		return cli.Exit(exitFailed, fmt.Errorf("the serving process cannot be started: %w", err))
	}
	stop := context.AfterFunc(ctx, func() { server.Process.Signal(syscall.SIGTERM) })
	defer stop()
	said, err := bufio.NewReader(r).ReadString('\n')
	if why, ok := strings.CutPrefix(strings.TrimSpace(said), inBackground); ok {
		fmt.Fprintf(os.Stderr, "%s: %s: %s; tried again in the background by process %d, whose log is %s\n",
			program.Name, filename.Quote(cfg.mountpoint), why, server.Process.Pid, filename.Quote(log.Name()))
		return server.Process.Release()
	} else if said = strings.TrimSpace(said); said != "" {
		code := exitMount
		if exit := (*exec.ExitError)(nil); errors.As(server.Wait(), &exit) && exit.ExitCode() > 0 {
			code = exit.ExitCode()
		}
		return cli.Exit(code, errors.New(said))
	}
	if err != io.EOF {
		return err
	}
	if m, err := mountAt(cfg.mountpoint); err != nil {
		// The pipe also closes when the process dies.
		state, _ := server.Process.Wait()
		return fmt.Errorf("the serving process ended (%v) before %s was usable; its log is %s", state, filename.Quote(cfg.mountpoint), filename.Quote(log.Name()))
	} else if m.Source != cfg.name {
		return fmt.Errorf("something else was mounted on %s meanwhile: %s", filename.Quote(cfg.mountpoint), filename.Quote(m.Source))
	}
	return server.Process.Release()
}

// readiness returns the function that tells whoever started this process how mounting went. It does nothing in the
// foreground.
func readiness() func(error) {
	if os.Getenv(readyEnv) == "" {
		return func(error) {}
	}
	os.Unsetenv(readyEnv)
	unix.CloseOnExec(readyFD) // fusermount3 is not to have it
	f := os.NewFile(readyFD, "ready")
	return func(err error) {
		unix.Setsid() // leaves the caller's session, with its terminal
		if later := (*backgroundError)(nil); errors.As(err, &later) {
			fmt.Fprintln(f, inBackground+filename.OneLine(err))
		} else if err != nil {
			fmt.Fprintln(f, filename.OneLine(err))
		}
		f.Close() // nobody reads what is said after that
	}
}

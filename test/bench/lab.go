package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxWrite is what both sides mount with, so that they get the same requests.
const maxWrite = 1 << 20

// lab is the directories and processes of a run; what it starts it ends.
type lab struct {
	bin  string
	disk string // a directory on the disk
	mem  string // a directory on a tmpfs of our own
}

func newLab() (*lab, error) {
	self, err := os.Executable() // weft and weftd are beside it
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "weft-bench-")
	if err != nil {
		return nil, err
	}
	l := &lab{bin: filepath.Dir(self), disk: dir, mem: filepath.Join(dir, "mem")}
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	if err := os.Mkdir(l.mem, 0o755); err != nil {
		return nil, err
	}
	return l, unix.Mount("weft-bench", l.mem, "tmpfs", 0, "size=6g,mode=755")
}

func (l *lab) close() error {
	if err := unix.Unmount(l.mem, unix.MNT_DETACH); err != nil {
		return err
	}
	return os.RemoveAll(l.disk)
}

// floor is how many fdatasyncs of 512 bytes the disk does in a second.
func (l *lab) floor() (float64, error) {
	f, err := os.Create(filepath.Join(l.disk, "floor"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	b := make([]byte, 512)
	n, start := 0, time.Now()
	for ; time.Since(start) < 300*time.Millisecond; n++ {
		if _, err := f.WriteAt(b, 0); err != nil {
			return 0, err
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return 0, err
		}
	}
	return float64(n) / time.Since(start).Seconds(), nil
}

// process is a server started for a measurement.
type process struct {
	cmd *exec.Cmd
	log bytes.Buffer
}

func start(name string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(name, args...)}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return p, p.cmd.Start()
}

func (p *process) stop() error {
	p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.AfterFunc(30*time.Second, func() { p.cmd.Process.Kill() })
	defer timer.Stop()
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w: %s", p.cmd.Path, err, p.log.String())
	}
	return nil
}

// await polls until ok, and gives up after a while.
func await(what string, ok func() bool) error {
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not after 30 s", what)
		}
	}
	return nil
}

func mounted(dir string) bool {
	b, _ := os.ReadFile("/proc/self/mounts")
	return bytes.Contains(b, []byte(" "+dir+" fuse"))
}

// volume is a weftd single with its data in dir.
type volume struct {
	l    *lab
	addr string
	srv  *process
}

func (l *lab) volume(dir string) (*volume, error) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	v := &volume{l: l, addr: free.Addr().String()}
	free.Close()
	if v.srv, err = start(filepath.Join(l.bin, "weftd"), "single", "--dir", filepath.Join(dir, "volume"), "--listen", v.addr); err != nil {
		return nil, err
	}
	return v, await("weftd", func() bool {
		return exec.Command(filepath.Join(l.bin, "weft"), "admin", "device", "ls", "--server", v.addr).Run() == nil
	})
}

func (v *volume) close() error {
	err := v.srv.stop()
	return errors.Join(err, os.RemoveAll(filepath.Join(v.l.disk, "volume")), os.RemoveAll(filepath.Join(v.l.mem, "volume")))
}

// mount mounts it on a new directory and returns that with its end.
func (v *volume) mount() (dir string, end func() error, err error) {
	if dir, err = os.MkdirTemp(v.l.disk, "mnt"); err != nil {
		return "", nil, err
	}
	weft := filepath.Join(v.l.bin, "weft")
	opts := fmt.Sprintf("max_write=%d,log=%s.log", maxWrite, dir)
	if out, err := exec.Command(weft, "mount", "-o", opts, v.addr+":/", dir).CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("mount: %w: %s", err, out)
	}
	return dir, func() error {
		if out, err := exec.Command(weft, "umount", dir).CombinedOutput(); err != nil {
			return fmt.Errorf("umount: %w: %s", err, out)
		}
		return nil
	}, nil
}

// bare mounts the baseline with some files in its root.
func (l *lab) bare(validity time.Duration, files int) (dir string, end func() error, err error) {
	if dir, err = os.MkdirTemp(l.disk, "bare"); err != nil {
		return "", nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return "", nil, err
	}
	p, err := start(self, bareCommand, dir, fmt.Sprint(maxWrite), validity.String(), fmt.Sprint(files))
	if err != nil {
		return "", nil, err
	}
	return dir, p.stop, await("the bare file system", func() bool { return mounted(dir) })
}

// fio runs one job and returns its bandwidth in bytes per second and its operations per second, read and write together.
func fio(dir string, args ...string) (bw, iops float64, err error) {
	cmd := exec.Command("fio", append([]string{"--name=bench", "--filename=file", "--size=512m", "--direct=1", "--output-format=json"}, args...)...)
	cmd.Dir = dir
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return 0, 0, fmt.Errorf("fio: %w: %s", err, errs.String())
	}
	type side struct {
		BW   float64 `json:"bw_bytes"`
		IOPS float64
	}
	var report struct {
		Jobs []struct{ Read, Write side }
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return 0, 0, err
	}
	for _, j := range report.Jobs {
		bw += j.Read.BW + j.Write.BW
		iops += j.Read.IOPS + j.Write.IOPS
	}
	return bw, iops, nil
}

package harness

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// DataServer is a data server that is a process of its own. Its methods are called one at a time.
type DataServer struct {
	v      *Volume
	Dir    string // of weftd
	addr   string
	Remote bool  // lends no descriptors, when it is started next
	disk   *Disk // of Options.Disks; nil: none
	run    *child
}

// URL is what it is called in the list of data servers.
func (d *DataServer) URL() string { return "nfs://" + d.addr + "/" }

// Path is where it keeps a data file that a layout names.
func (d *DataServer) Path(dataFile string) string { return filepath.Join(d.Dir, "export", dataFile) }

// AddLocal adds a data server to the volume that lends descriptors, whatever the others do, with so many bytes of memory, or if that is
// 0 on the disk.
func (v *Volume) AddLocal(room int64) *DataServer {
	v.t.Helper()
	d := newDataServer(v, filepath.Join(v.base, "local"), room, false)
	Weft(v.t, "admin", "device", "add", d.URL(), "--server", v.Addr)
	return d
}

// freeAddr is FreeAddr where all of the volume's services are reached.
func (v *Volume) freeAddr() string {
	if v.Cluster != nil {
		return v.Cluster.address(1)
	}
	return FreeAddr(v.t)
}

// newDataServer starts one, which ends with the test.
func newDataServer(v *Volume, dir string, room int64, remote bool) *DataServer {
	v.t.Helper()
	d := &DataServer{v: v, Dir: dir, addr: v.freeAddr(), Remote: remote}
	if room > 0 {
		if err := os.Mkdir(d.Dir, 0o755); err != nil {
			v.t.Fatal(err)
		}
		if err := unix.Mount("weft-test", d.Dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=755", room)); err != nil {
			v.t.Fatal(err)
		}
		v.t.Cleanup(func() { unix.Unmount(d.Dir, unix.MNT_DETACH) })
	}
	d.Start()
	v.t.Cleanup(func() {
		if !d.run.gone() {
			d.Continue()
			d.run.end(v.t, syscall.SIGTERM)
		}
	})
	return d
}

// Start starts it, where it was before.
func (d *DataServer) Start() {
	d.v.t.Helper()
	args := []string{"data", "--dir", d.Dir, "--listen", d.addr}
	if d.Remote {
		args = append(args, "--localio=off")
	}
	d.run = launch(d.v.t, d.v.log, d.v.opts.Env, "weftd", args...)
	Await(d.v.t, "a data server at "+d.addr, func() bool {
		c, err := net.Dial("tcp", d.addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// Kill ends it with SIGKILL, Stop with SIGTERM.
func (d *DataServer) Kill() { d.run.end(d.v.t, syscall.SIGKILL) }
func (d *DataServer) Stop() {
	if err := d.run.end(d.v.t, syscall.SIGTERM); err != nil {
		d.v.t.Errorf("weftd data: %v", err)
	}
}

// PowerCut ends it as a power cut does that comes in the midst of what it does, and mounts its disk anew, which no
// other server may use.
func (d *DataServer) PowerCut() {
	d.v.t.Helper()
	d.Pause() // nothing is answered with an error of a disk that is off
	d.disk.Cut()
	d.Kill()
	d.disk.Remount()
}

// Forget makes it, when it is started next, have another write verifier, as a foreign server has after each restart:
// clients send again what is not stable. It has ended.
func (d *DataServer) Forget() { forget(d.v.t, d.Dir) }

// Forget makes the data servers of a weftd single, which has ended, have other write verifiers.
func (v *Volume) Forget() {
	v.t.Helper()
	for i := range v.opts.DataServers {
		forget(v.t, filepath.Join(v.Dir, "data", fmt.Sprint(i)))
	}
}

func forget(t testing.TB, dir string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, "verifier")); err != nil {
		t.Fatal(err)
	}
}

// Port is where it listens.
func (d *DataServer) Port() string {
	_, port, _ := net.SplitHostPort(d.addr)
	return port
}

// Fill takes what is left of its Options.Room; the function that it returns gives it back.
func (d *DataServer) Fill() (undo func()) {
	d.v.t.Helper()
	f, err := os.Create(filepath.Join(d.Dir, "filler"))
	if err != nil {
		d.v.t.Fatal(err)
	}
	defer f.Close()
	for size := int64(1 << 20); size >= 4096; {
		end, err := f.Seek(0, io.SeekEnd)
		if err == nil {
			err = unix.Fallocate(int(f.Fd()), 0, end, size)
		}
		switch {
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		case err != nil:
			d.v.t.Fatal(err)
		}
	}
	return func() {
		if err := os.Remove(f.Name()); err != nil {
			d.v.t.Error(err)
		}
	}
}

// Pause makes it stand still, Continue go on.
func (d *DataServer) Pause()    { freezeProcess(d.v.t, d.run.cmd.Process.Pid) }
func (d *DataServer) Continue() { d.run.cmd.Process.Signal(syscall.SIGCONT) }

// ServerAt finds the data server by its address in a layout, HOST:PORT:/EXPORT.
func (v *Volume) ServerAt(address string) *DataServer {
	v.t.Helper()
	for _, d := range v.Servers {
		if d.addr+":/" == address {
			return d
		}
	}
	v.t.Fatalf("no data server is at %s", address)
	return nil
}

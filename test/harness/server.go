package harness

import (
	"fmt"
	"net"
	"path/filepath"
	"syscall"
)

// DataServer is a data server that is a process of its own. Its methods are called one at a time.
type DataServer struct {
	v    *Volume
	Dir  string // of weftd
	addr string
	run  *child
}

// URL is what it is called in the list of data servers.
func (d *DataServer) URL() string { return "nfs://" + d.addr + "/" }

// Path is where it keeps a data file that a layout names.
func (d *DataServer) Path(dataFile string) string { return filepath.Join(d.Dir, "export", dataFile) }

// newDataServer starts one, which ends with the test.
func newDataServer(v *Volume, i int) *DataServer {
	v.t.Helper()
	d := &DataServer{v: v, Dir: filepath.Join(v.base, fmt.Sprintf("server%d", i)), addr: FreeAddr(v.t)}
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
	d.run = launch(d.v.t, d.v.log, d.v.opts.Env, "weftd", "data", "--dir", d.Dir, "--listen", d.addr)
	Await(d.v.t, "a data server at "+d.addr, func() bool {
		c, err := net.Dial("tcp", d.addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// Kill ends it with SIGKILL.
func (d *DataServer) Kill() { d.run.end(d.v.t, syscall.SIGKILL) }

// Pause makes it stand still, Continue go on.
func (d *DataServer) Pause()    { d.run.cmd.Process.Signal(syscall.SIGSTOP) }
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

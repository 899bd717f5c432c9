package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/porttest"
	"github.com/weftfs/weft/layout"
)

// startAddrs starts this program with a command that writes a line of addresses when it is ready.
func startAddrs(args ...string) (*process, []netip.AddrPort, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	p := &process{cmd: exec.Command(self, args...)}
	p.cmd.Stderr = &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	var addrs []netip.AddrPort
	for _, s := range strings.Fields(line) {
		a, e := netip.ParseAddrPort(s)
		addrs, err = append(addrs, a), errors.Join(err, e)
	}
	if err != nil {
		p.stop() // its log tells more
		return nil, nil, fmt.Errorf("%v: %w: %s", args, err, p.log.String())
	}
	return p, addrs, nil
}

func freePort() (netip.AddrPort, error) {
	addr, err := porttest.Addr()
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(addr)
}

func listening(addr netip.AddrPort) bool {
	nc, err := net.Dial("tcp", addr.String())
	if err != nil {
		return false
	}
	nc.Close()
	return true
}

// columns are data servers, each with a column of a file of dataSize bytes.
type columns struct {
	dirs  []string // of the servers
	files []file
	srv   *process
	url   url.URL // of Ganesha, as weft admin device add takes it
}

// close ends the servers and removes what they have.
func (c *columns) close() error {
	var errs []error
	if c.srv != nil {
		errs = append(errs, c.srv.stop())
	}
	for _, dir := range c.dirs {
		errs = append(errs, os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

// paths are the data files.
func (c *columns) paths() (paths []string) {
	for _, dir := range c.dirs {
		paths = append(paths, filepath.Join(dir, "export", "f"))
	}
	return paths
}

func newDirs(where string, n int) (dirs []string, err error) {
	for range n {
		dir, err := os.MkdirTemp(where, "ds")
		if err != nil {
			return dirs, err
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}

// dataServers starts n servers, of one weftd data, with their directories in where.
func (l *lab) dataServers(where string, n int, args ...string) (c *columns, err error) {
	c = new(columns)
	if c.dirs, err = newDirs(where, n); err != nil {
		return nil, err
	}
	var addrs []netip.AddrPort
	for _, dir := range c.dirs {
		a, err := freePort()
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, a)
		args = append(args, "--dir", dir, "--listen", a.String())
	}
	if c.srv, err = start(filepath.Join(l.bin, "weftd"), append([]string{"data"}, args...)...); err != nil {
		return nil, err
	}
	// The program listens before it looks into its directories, and refuses one that has files and no key.
	key := filepath.Join(c.dirs[n-1], "key")
	ready := func() bool { _, err := os.Stat(key); return err == nil && listening(addrs[n-1]) }
	if err := await("weftd data", ready); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, c.fill(addrs)
}

// shapedServers starts servers, of one process, that are slower than they could be.
func (l *lab) shapedServers(where string, shapes ...shape) (c *columns, err error) {
	c = new(columns)
	if c.dirs, err = newDirs(where, len(shapes)); err != nil {
		return nil, err
	}
	args := []string{dataCommand}
	for i, s := range shapes {
		args = append(append(args, s.args()...), c.dirs[i])
	}
	var addrs []netip.AddrPort
	if c.srv, addrs, err = startAddrs(args...); err != nil {
		return nil, err
	}
	return c, c.fill(addrs)
}

// fill writes the columns of the file.
func (c *columns) fill(addrs []netip.AddrPort) error {
	for i, path := range c.paths() {
		if err := fillColumn(path, i, len(c.dirs)); err != nil {
			return errors.Join(err, c.close())
		}
		f, err := lookup(addrs[i], addrs[i], "/")
		if err != nil {
			return errors.Join(err, c.close())
		}
		c.files = append(c.files, f)
	}
	return nil
}

// fillColumn writes what column i of n has.
func fillColumn(path string, i, n int) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	b := bytes.Repeat([]byte("weft"), unit/4)
	for off := int64(i) * unit; off < dataSize; off += int64(n) * unit {
		if _, err := f.WriteAt(b, off); err != nil {
			return err
		}
	}
	return nil
}

// lookup finds the file f of an export.
func lookup(addr, mountd netip.AddrPort, export string) (file, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	root, err := nfs3.Mount(ctx, mountd, export, nil)
	if err != nil {
		return file{}, err
	}
	t, err := nfs3.New(nfs3.Config{Name: addr.String(), Addrs: []netip.AddrPort{addr}})
	if err != nil {
		return file{}, err
	}
	defer t.Close()
	fh, _, err := t.Lookup(ctx, layout.Credential{}, root, "f")
	return file{addr: addr, handle: fh}, err
}

const ganeshaConfig = `NFS_CORE_PARAM {
	Protocols = 3;
	NFS_Port = %d; MNT_Port = %d; NLM_Port = %d; Rquota_Port = %d;
	Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;
	Bind_addr = 127.0.0.1;
	mount_path_pseudo = false;
}
NFSv4 { Graceless = true; RecoveryBackend = fs; }
NFS_KRB5 { Active_krb5 = false; }
EXPORT_DEFAULTS { Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 3; Transports = TCP; PrivilegedPort = false; }
EXPORT {
	Export_Id = 1; Path = %s; Pseudo = /e1;
	MaxRead = 4194304; MaxWrite = 4194304; PrefRead = 1048576; PrefWrite = 1048576;
	FSAL { Name = VFS; }
}
LOG { Default_Log_Level = EVENT; }
`

// ganesha starts an NFS-Ganesha with a file of dataSize bytes on the tmpfs. It wants an rpcbind, which this starts, too,
// unless one runs.
func (l *lab) ganesha() (c *columns, end func() error, err error) {
	var servers []*process
	c = new(columns)
	end = func() error {
		var errs []error
		for i := range servers {
			errs = append(errs, servers[len(servers)-1-i].stop())
		}
		return errors.Join(append(errs, c.close())...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, end())
		}
	}()
	rpcbind := netip.MustParseAddrPort("127.0.0.1:111")
	if !listening(rpcbind) {
		p, err := start("rpcbind", "-f")
		if err != nil {
			return nil, nil, err
		}
		p.signaled = true
		servers = append(servers, p)
		if err := await("rpcbind", func() bool { return listening(rpcbind) }); err != nil {
			return nil, nil, err
		}
	}
	if c.dirs, err = newDirs(l.mem, 1); err != nil {
		return nil, nil, err
	}
	dir := c.dirs[0]
	export := filepath.Join(dir, "export")
	if err := os.Mkdir(export, 0o755); err != nil {
		return nil, nil, err
	}
	if err := fillColumn(c.paths()[0], 0, 1); err != nil {
		return nil, nil, err
	}
	var ports [4]netip.AddrPort
	for i := range ports {
		if ports[i], err = freePort(); err != nil {
			return nil, nil, err
		}
	}
	conf := filepath.Join(dir, "ganesha.conf")
	text := fmt.Sprintf(ganeshaConfig, ports[0].Port(), ports[1].Port(), ports[2].Port(), ports[3].Port(), export)
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		return nil, nil, err
	}
	log := filepath.Join(dir, "log")
	if err := os.MkdirAll("/var/run/ganesha", 0o755); err != nil { // its package's own, which a container may lack
		return nil, nil, err
	}
	p, err := start("ganesha.nfsd", "-F", "-f", conf, "-L", log, "-p", filepath.Join(dir, "pid"), "-N", "EVENT")
	if err != nil {
		return nil, nil, err
	}
	p.signaled = true
	servers = append(servers, p)
	if err := await("ganesha.nfsd", func() bool { return listening(ports[0]) && listening(ports[1]) }); err != nil {
		text, _ := os.ReadFile(log)
		return nil, nil, fmt.Errorf("%w: %s", err, text)
	}
	f, err := lookup(ports[0], ports[1], export)
	if err != nil {
		return nil, nil, err
	}
	c.files = []file{f}
	c.url = url.URL{Scheme: "nfs", Host: ports[0].String(), Path: export, RawQuery: fmt.Sprint("mountport=", ports[1].Port())}
	return c, end, nil
}

// memoryGroup makes a memory cgroup, of either version, and returns what puts a process into it.
func memoryGroup(limit int64) (join func(pid int) error, end func() error, err error) {
	root, limitFile := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && bytes.Contains(controllers, []byte("memory")) {
		root, limitFile = "/sys/fs/cgroup", "memory.max"
	}
	dir := filepath.Join(root, fmt.Sprint("weft-bench-", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, nil, fmt.Errorf("a memory cgroup: %w", err)
	}
	end = func() error { return await("end of the memory cgroup", func() bool { return unix.Rmdir(dir) == nil }) }
	if err := os.WriteFile(filepath.Join(dir, limitFile), []byte(strconv.FormatInt(limit, 10)), 0o644); err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return func(pid int) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644)
	}, end, nil
}

// directRead is how fast files are read past the page cache, depth requests at once: the raw disk.
func directRead(paths []string, size, depth int) (float64, error) {
	type part struct {
		f   *os.File
		off int64
	}
	parts := make(chan part)
	errs := make(chan error, depth)
	var total int64
	for range depth {
		go func() { // a reader; ends when parts is closed
			mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
			for p := range parts {
				if err == nil {
					if _, e := p.f.ReadAt(mem, p.off); e != io.EOF {
						err = e
					}
				}
			}
			if mem != nil {
				unix.Munmap(mem)
			}
			errs <- err
		}()
	}
	begin := time.Now()
	var err error
	for _, path := range paths {
		f, e := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
		if e != nil {
			err = e
			break
		}
		defer f.Close()
		st, e := f.Stat()
		if e != nil {
			err = e
			break
		}
		for off := int64(0); off < st.Size(); off += int64(size) {
			parts <- part{f, off}
		}
		total += st.Size()
	}
	close(parts)
	for range depth {
		err = errors.Join(err, <-errs)
	}
	return float64(total) / 1e6 / time.Since(begin).Seconds(), err
}

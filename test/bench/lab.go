package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/waittest"
)

// maxWrite is what both sides mount with, so that they get the same requests.
const maxWrite = 1 << 20

// lab is the directories and processes of a run; what it starts it ends.
type lab struct {
	bin  string
	disk string // a directory on the disk
	mem  string // a directory on a tmpfs of our own
	vm   *guest // none before a row wants it

	sources map[string]*source // trees, by name
	deep    map[int]string     // directories of volumes, by how many files they have
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
	l := &lab{bin: filepath.Dir(self), disk: dir, mem: filepath.Join(dir, "mem"), sources: map[string]*source{}, deep: map[int]string{}}
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	if err := os.Mkdir(l.mem, 0o755); err != nil {
		return nil, err
	}
	return l, unix.Mount("weft-bench", l.mem, "tmpfs", 0, "size=6g,mode=755")
}

func (l *lab) close() error {
	var err error
	if l.vm != nil {
		err = l.vm.end()
	}
	if e := unix.Unmount(l.mem, unix.MNT_DETACH); e != nil {
		return errors.Join(err, e)
	}
	return errors.Join(err, os.RemoveAll(l.disk))
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
	cmd      *exec.Cmd
	log      bytes.Buffer
	signaled bool // that a signal ends it is no error
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
	if err := p.cmd.Wait(); err != nil && !p.signaled {
		return fmt.Errorf("%s: %w: %s", p.cmd.Path, err, p.log.String())
	}
	return nil
}

// await polls until ok, and gives up after a while.
func await(what string, ok func() bool) error {
	if !waittest.Poll(30*time.Second, 10*time.Millisecond, ok) {
		return fmt.Errorf("%s: not after 30 s", what)
	}
	return nil
}

func mounted(dir string) bool {
	b, _ := os.ReadFile("/proc/self/mounts")
	return bytes.Contains(b, []byte(" "+dir+" fuse"))
}

// volume is a metadata service and data servers.
type volume struct {
	l    *lab
	addr string
	srv  *process   // weftd single or meta
	data []*columns // of the latter, which end with it; none: srv has them
	env  []string   // added to that of mounts
}

// volume starts a weftd single with its data in dir.
func (l *lab) volume(dir string, args ...string) (*volume, error) {
	return l.weftd(nil, append([]string{"single", "--dir", filepath.Join(dir, "volume")}, args...)...)
}

// slowVolume starts a volume on the tmpfs whose data servers are slower than they could be.
func (l *lab) slowVolume(servers int, s shape) (*volume, error) {
	c, err := l.shapedServers(l.mem, slices.Repeat([]shape{s}, servers)...)
	if err != nil {
		return nil, err
	}
	return l.volumeOn(c)
}

// volumeOn starts a volume on data servers, which end with it.
func (l *lab) volumeOn(data ...*columns) (*volume, error) {
	args := []string{"meta", "--dir", filepath.Join(l.mem, "volume")}
	for _, c := range data {
		for _, f := range c.files {
			args = append(args, "--data-server", f.addr.String()+":/")
		}
	}
	return l.weftd(data, args...)
}

func (l *lab) weftd(data []*columns, args ...string) (*volume, error) {
	addr, err := freePort()
	if err != nil {
		return nil, err
	}
	v := &volume{l: l, addr: addr.String(), data: data}
	if v.srv, err = start(filepath.Join(l.bin, "weftd"), append(args, "--listen", v.addr)...); err != nil {
		return nil, err
	}
	return v, await("weftd", func() bool {
		return exec.Command(filepath.Join(l.bin, "weft"), "admin", "device", "ls", "--server", v.addr).Run() == nil
	})
}

func (v *volume) close() error {
	err := v.srv.stop()
	for _, c := range v.data {
		err = errors.Join(err, c.close())
	}
	return errors.Join(err, os.RemoveAll(filepath.Join(v.l.disk, "volume")), os.RemoveAll(filepath.Join(v.l.mem, "volume")))
}

// weft runs weft and returns its standard output.
func (l *lab) weft(args ...string) ([]byte, error) {
	var errs strings.Builder
	cmd := exec.Command(filepath.Join(l.bin, "weft"), args...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("weft %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out, nil
}

// dataFile is where a column of a file is.
type dataFile struct {
	Address string // HOST:PORT:/EXPORT
	Path    string `json:"data_file"` // below the export
}

// dataFileOf asks for the first column of a file on a mount, which has data.
func (l *lab) dataFileOf(path string) (dataFile, error) {
	out, err := l.weft("layout", path, "--json")
	if err != nil {
		return dataFile{}, err
	}
	var found struct {
		Mirrors []struct{ Servers []dataFile }
	}
	if err := json.Unmarshal(out, &found); err != nil {
		return dataFile{}, fmt.Errorf("layout of %s: %w", path, err)
	}
	return found.Mirrors[0].Servers[0], nil
}

// use runs do on a mount of the volume and ends both.
func (v *volume) use(do func(dir string) error, opts ...string) error {
	dir, end, err := v.mount(opts...)
	if err != nil {
		return errors.Join(err, v.close())
	}
	return errors.Join(do(dir), end(), v.close())
}

// mount mounts it on a new directory, with options besides the usual ones, and returns that with its end.
func (v *volume) mount(opts ...string) (dir string, end func() error, err error) {
	if dir, err = os.MkdirTemp(v.l.disk, "mnt"); err != nil {
		return "", nil, err
	}
	weft := filepath.Join(v.l.bin, "weft")
	opts = append([]string{fmt.Sprint("max_write=", maxWrite), "log=" + dir + ".log", "localio=off"}, opts...)
	cmd := exec.Command(weft, "mount", "-o", strings.Join(opts, ","), v.addr+":/", dir)
	cmd.Env = append(os.Environ(), v.env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("mount: %w: %s", err, out)
	}
	return dir, func() error {
		if out, err := exec.Command(weft, "umount", dir).CombinedOutput(); err != nil {
			return fmt.Errorf("umount: %w: %s", err, out)
		}
		return nil
	}, nil
}

// mountPID is the process that serves a mount.
func mountPID(dir string) (pid int) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range all {
		args, _ := os.ReadFile(path)
		if bytes.HasSuffix(args, []byte("\x00"+dir+"\x00")) {
			fmt.Sscanf(path, "/proc/%d/", &pid)
		}
	}
	return pid
}

// bare mounts the baseline with some files in its root, and READs that take a while. The data is in files
// of the directory where, unless that is empty; then, with passArg, the kernel reads and writes them.
func (l *lab) bare(validity time.Duration, files int, delay time.Duration, where string, more ...string) (dir string, p *process, err error) {
	if dir, err = os.MkdirTemp(l.disk, "bare"); err != nil {
		return "", nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return "", nil, err
	}
	args := []string{bareCommand, dir, fmt.Sprint(maxWrite), validity.String(), fmt.Sprint(files), delay.String()}
	if where != "" {
		args = append(append(args, where), more...)
	}
	p, err = start(self, args...)
	if err != nil {
		return "", nil, err
	}
	return dir, p, await("the bare file system", func() bool { return mounted(dir) })
}

// fioArgs are those of one job.
func fioArgs(files string, args ...string) []string {
	return append([]string{"--name=bench", "--filename=" + files, "--size=512m", "--direct=1", "--output-format=json"}, args...)
}

// fioResult is what a job did: bandwidth in bytes per second, operations per second, and bytes, of reads and writes
// together, the processor time that fio took, and how long all but one in a thousand reads took at most, in seconds.
type fioResult struct{ bw, iops, bytes, cpu, p999 float64 }

// fio runs one job on the file "file".
func fio(dir string, args ...string) (fioResult, error) { return fioOn(dir, "file", args...) }

// timed has a job go on for sample.
const timed = "--time_based"

// fioOn runs one job on files, with colons between them.
func fioOn(dir, files string, args ...string) (r fioResult, err error) {
	if !slices.Contains(args, timed) { // it only prepares
		return fioOnce(dir, files, args...)
	}
	if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--runtime=") }) {
		args = append(args, fmt.Sprint("--runtime=", sample.Seconds()))
	}
	_, err = inTurns(func(*turn) (float64, float64, time.Duration, error) {
		r, err = fioOnce(dir, files, args...)
		took := r.bytes / r.bw
		return r.iops, r.iops * took, time.Duration(took * float64(time.Second)), err
	})
	return r, err
}

func fioOnce(dir, files string, args ...string) (r fioResult, err error) {
	cmd := exec.Command("fio", fioArgs(files, args...)...)
	cmd.Dir = dir
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return r, fmt.Errorf("fio: %w: %s", err, errs.String())
	}
	r, err = fioReport(out)
	r.cpu = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	return r, err
}

// fioReport reads what fio says of a job.
func fioReport(out []byte) (r fioResult, err error) {
	type side struct {
		BW    float64 `json:"bw_bytes"`
		Bytes float64 `json:"io_bytes"`
		IOPS  float64
		Lat   struct{ Percentile map[string]float64 } `json:"clat_ns"`
	}
	var report struct {
		Jobs []struct{ Read, Write side }
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return r, err
	}
	for _, j := range report.Jobs {
		r.bw += j.Read.BW + j.Write.BW
		r.iops += j.Read.IOPS + j.Write.IOPS
		r.bytes += j.Read.Bytes + j.Write.Bytes
		r.p999 = j.Read.Lat.Percentile["99.900000"] / 1e9
	}
	return r, nil
}

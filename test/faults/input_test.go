package faults

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// refused runs a program that must fail with one line on standard error that holds all of words, and no mount left. It
// returns the exit code.
func refused(t *testing.T, mountpoint string, cmd *exec.Cmd, words ...string) int {
	t.Helper()
	var errs bytes.Buffer
	cmd.Stderr = &errs
	done := make(chan error, 1)
	go func() { done <- cmd.Run() }()
	var err error
	select {
	case err = <-done:
	case <-time.After(time.Minute):
		cmd.Process.Kill()
		t.Fatalf("%v: no answer for a minute; so far: %s", cmd.Args, errs.String())
	}
	said := strings.TrimSpace(errs.String())
	if err == nil {
		t.Fatalf("%v: no error", cmd.Args)
	}
	if strings.Count(said, "\n") != 0 {
		t.Errorf("%v: more than one line:\n%s", cmd.Args, said)
	}
	for _, w := range words {
		if !strings.Contains(said, w) {
			t.Errorf("%v: %q does not contain %q", cmd.Args, said, w)
		}
	}
	if mountpoint != "" && harness.Mounted(mountpoint) {
		t.Errorf("%v: %s is mounted all the same", cmd.Args, mountpoint)
	}
	t.Logf("%s", said)
	return cmd.ProcessState.ExitCode()
}

func TestBadMounts(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 1})
	dir := harness.Dir(t)
	mnt := filepath.Join(dir, "mnt")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	mount := func(args ...string) *exec.Cmd {
		return exec.Command(harness.Bin(t, "weft"), append([]string{"mount", "-o", "log=" + filepath.Join(dir, "log")}, args...)...)
	}
	src := v.Addr + ":/"
	refused(t, mnt, mount("no-such-host.invalid:/", mnt), "no-such-host.invalid")
	refusing := harness.FreeAddr(t)
	if code := refused(t, mnt, mount(refusing+":/", mnt), refusing, "refused"); code != 32 {
		t.Errorf("a mount that fails exits with %d, want 32 as mount(8) has it", code)
	}
	refused(t, mnt, mount(serve(t, func(c net.Conn) { io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n") })+":/", mnt), "not a weft metadata service")
	refused(t, mnt, mount(serve(t, func(c net.Conn) { io.Copy(io.Discard, c) })+":/", mnt), "does not answer", "weft metadata service")
	refused(t, mnt, mount(src+"no/such/dir", mnt), "no directory /no", "make it there")
	refused(t, mnt, mount(src, filepath.Join(dir, "missing")), "missing", "does not exist")
	refused(t, "", mount(src, file), file, "not a directory")
	if code := refused(t, mnt, mount("-o", "nconect=4", src, mnt), "nconect", "nconnect"); code != 1 {
		t.Errorf("a wrong option exits with %d, want 1", code)
	}
	refused(t, mnt, mount("-o", "nconnect=many", src, mnt), "nconnect=many", "1 to 16")
	refused(t, mnt, mount("-o", "rsize=12345678901234567890", src, mnt), "rsize", "4.0 MiB")
	refused(t, mnt, mount("-o", "ro=1", src, mnt), "ro", "no value")
	refused(t, mnt, mount("nonsense", mnt), "nonsense", "HOST[:PORT]:/")
	refused(t, mnt, mount(src), "MOUNTPOINT")

	// Over a directory that is not empty is fine, over a weft mount it is not.
	if err := os.WriteFile(filepath.Join(mnt, "below"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := mount(src, mnt).CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("mount: %v: %s", err, out)
	}
	defer harness.Run(t, "", harness.Bin(t, "weft"), "umount", mnt)
	refused(t, "", mount(src, mnt), mnt, "already")

	// A mount point with a space, reached by a symbolic link, with the source as the kernel shows it.
	spaced := filepath.Join(dir, "sp ace")
	if err := errors.Join(os.Mkdir(spaced, 0o755), os.Symlink("sp ace", filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	harness.Run(t, dir, harness.Bin(t, "weft"), "mount", "-o", "log=relative", v.Addr+":/", "link")
	var st []struct{ Mountpoint, Source string }
	unmarshal(t, harness.Weft(t, "status", filepath.Join(dir, "link"), "--json"), &st)
	if st[0].Mountpoint != spaced {
		t.Errorf("mounted on %q, want %q", st[0].Mountpoint, spaced)
	}
	harness.Weft(t, "umount", spaced)
	harness.Run(t, dir, harness.Bin(t, "weft"), "mount", "-o", "log=relative", st[0].Source, "sp ace")
	harness.Run(t, dir, harness.Bin(t, "weft"), "umount", "link")

	// Without /dev/fuse: in a mount namespace where an empty directory hides it.
	hide := exec.Command("unshare", "-m", "sh", "-c", `mount -t tmpfs none /dev && exec "$@"`, "sh",
		harness.Bin(t, "weft"), "mount", "-f", src, dir)
	refused(t, dir, hide, "/dev/fuse")
}

// serve answers each connection and returns the address.
func serve(t *testing.T, answer func(net.Conn)) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				answer(c)
			}()
		}
	}()
	return l.Addr().String()
}

func TestBadServers(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 1})
	weftd := func(args ...string) *exec.Cmd { return exec.Command(harness.Bin(t, "weftd"), args...) }
	other := harness.FreeAddr(t)
	refused(t, "", weftd("single", "--dir", v.Dir, "--listen", other), v.Dir, "another weftd")
	refused(t, "", weftd("meta", "--dir", v.Dir, "--listen", other), v.Dir, "another weftd")
	refused(t, "", weftd("data", "--dir", filepath.Join(v.Dir, "data/0"), "--listen", other), "data/0", "another")
	refused(t, "", weftd("fsck", "--dir", v.Dir), v.Dir, "weftd")
	refused(t, "", weftd("single", "--dir", harness.Dir(t), "--listen", v.Addr), v.Addr, "in use")
	refused(t, "", weftd("single"), "--dir")
	refused(t, "", weftd("fsck", "--dir", "/no/such/dir"), "/no/such/dir")
	refused(t, "", weftd("data", "--dir", "a,b", "--listen", other), "2 directories")
	v.Stop()

	// A catalog that lost its end, as after a bad disk.
	manifests, err := filepath.Glob(filepath.Join(v.Dir, "catalog", "MANIFEST-*"))
	if err != nil || len(manifests) == 0 {
		t.Fatalf("no MANIFEST: %v", err)
	}
	for _, m := range manifests {
		whole, err := os.ReadFile(m)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(m, bytes.Repeat([]byte{0xff}, len(whole)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	refused(t, "", weftd("meta", "--dir", v.Dir, "--listen", other), "catalog")
}

// split is a metadata service and one data server as separate processes.
type split struct {
	t                  *testing.T
	metaAddr, dataAddr string
	metaDir, dataDir   string
	meta, data         *harness.Proc
}

func newSplit(t *testing.T, dataDir string) *split {
	harness.NeedMount(t)
	s := &split{t: t, metaAddr: harness.FreeAddr(t), dataAddr: harness.FreeAddr(t), metaDir: harness.Dir(t), dataDir: dataDir}
	s.startData()
	s.meta = harness.Spawn(t, "weftd", "meta", "--dir", s.metaDir, "--listen", s.metaAddr, "--data-server", s.dataAddr+":/")
	harness.Await(t, "the data server in the volume", func() bool {
		out, err := exec.Command(harness.Bin(t, "weft"), "admin", "device", "ls", "--server", s.metaAddr).Output()
		return err == nil && bytes.Contains(out, []byte(s.dataAddr))
	})
	return s
}

func (s *split) startData() {
	s.data = harness.Spawn(s.t, "weftd", "data", "--dir", s.dataDir, "--listen", s.dataAddr)
	harness.AwaitListen(s.t, s.dataAddr)
}

// TestDataServerDown: a mount works without its data server, I/O waits and can be interrupted, and goes on by itself.
func TestDataServerDown(t *testing.T) {
	s := newSplit(t, harness.Dir(t))
	m := harness.MountAt(t, s.metaAddr)
	if err := os.WriteFile(m.Dir+"/before", []byte("before"), 0o644); err != nil {
		t.Fatal(err)
	}
	m.Unmount()
	s.data.End(syscall.SIGKILL)

	m = harness.MountAt(t, s.metaAddr)
	if entries, err := os.ReadDir(m.Dir); err != nil || len(entries) != 1 {
		t.Fatalf("names without a data server: %v, %v", entries, err)
	}
	// A reader waits, and a signal ends it.
	cat := exec.Command("cat", m.Dir+"/before")
	if err := cat.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cat.Wait() }()
	select {
	case err := <-ended:
		t.Fatalf("cat did not wait for the data server: %v", err)
	case <-time.After(2 * time.Second):
	}
	cat.Process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("cat cannot be interrupted")
	}
	if d := devices(t, m)[0].Mount; d.Trouble == "" || d.Reads.Ops > 0 || d.Path != "tcp" {
		t.Errorf("status while the data server is down: %+v", d)
	}
	// One that is not interrupted gets its bytes once the server is back.
	var out bytes.Buffer
	cat = exec.Command("cat", m.Dir+"/before")
	cat.Stdout = &out
	if err := cat.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	s.startData()
	if err := cat.Wait(); err != nil || out.String() != "before" {
		t.Fatalf("cat: %q, %v", out.String(), err)
	}
	if d := devices(t, m)[0].Mount; d.Trouble != "" || d.Reads.Ops != 1 || d.Reads.Bytes != uint64(len("before")) {
		t.Errorf("status when the data server is back: %+v", d)
	}
}

// device is what `weft status` says of one.
type device struct {
	ID    string
	Mount struct {
		Path, Trouble string
		Reads, Writes struct{ Ops, Bytes uint64 }
	}
}

// devices are those of a mount.
func devices(t *testing.T, m *harness.Mount) []device {
	t.Helper()
	var st []struct{ Devices []device }
	unmarshal(t, harness.Weft(t, "status", "--json", m.Dir), &st)
	return st[0].Devices
}

// TestStatus: what is read and written counts at the device where it is.
func TestStatus(t *testing.T) {
	const mib = 1 << 20
	m := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 4}).Mount()
	data := bytes.Repeat([]byte("weft"), 10*mib/4)
	if err := os.WriteFile(m.Dir+"/striped", data, 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "sync", m.Dir) // what is not stable is read twice if a connection is made meanwhile
	if b, err := os.ReadFile(m.Dir + "/striped"); err != nil || !bytes.Equal(b, data) {
		t.Fatalf("read %d bytes, %v", len(b), err)
	}
	var file struct {
		Mirrors []struct{ Servers []struct{ Device string } }
	}
	unmarshal(t, harness.Weft(t, "layout", "--json", m.Dir+"/striped"), &file)
	if len(file.Mirrors) != 1 || len(file.Mirrors[0].Servers) != 4 {
		t.Fatalf("layout %+v", file)
	}
	all := devices(t, m)
	if len(all) != 4 {
		t.Fatalf("%d devices of 4", len(all))
	}
	for column, server := range file.Mirrors[0].Servers {
		want := uint64(2 * mib)
		if column < 2 {
			want += mib // the ninth and tenth
		}
		i := slices.IndexFunc(all, func(d device) bool { return d.ID == server.Device })
		if i < 0 {
			t.Fatalf("device %s is not in %+v", server.Device, all)
		}
		if d := all[i].Mount; d.Reads.Bytes != want || d.Writes.Bytes != want || d.Reads.Ops < want/mib || d.Path != "tcp" {
			t.Errorf("column %d: %+v, want %d bytes", column, d, want)
		}
	}
	m.Unmount()
}

// TestForce: with every server dead and a process waiting, umount --force ends it all.
func TestForce(t *testing.T) {
	s := newSplit(t, harness.Dir(t))
	dir := harness.Dir(t)
	log := filepath.Join(harness.Dir(t), "log")
	harness.Weft(t, "mount", "-o", "log="+log, s.metaAddr+":/", dir)
	f, err := os.Create(dir + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s.data.End(syscall.SIGKILL)
	s.meta.End(syscall.SIGKILL)
	wrote := make(chan error, 1)
	go func() {
		_, err := f.Write(make([]byte, 1<<20))
		wrote <- err
	}()
	select {
	case err := <-wrote:
		t.Fatalf("a write to dead servers: %v", err)
	case <-time.After(time.Second):
	}
	harness.Weft(t, "umount", "--force", dir)
	select {
	case err := <-wrote:
		if err == nil {
			t.Fatal("a write that nobody took succeeded")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the writer still waits")
	}
	if harness.Mounted(dir) {
		t.Fatal("still mounted")
	}
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(b), dir) {
		t.Fatalf("mountinfo still names it: %v", err)
	}
}

// TestFull: ENOSPC reaches the application, and removing a file makes room again.
func TestFull(t *testing.T) {
	harness.NeedMount(t)
	small := harness.Dir(t)
	if err := unix.Mount("weft-test", small, "tmpfs", 0, "size=64m,mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(small, unix.MNT_DETACH) })
	s := newSplit(t, small)
	m := harness.MountAt(t, s.metaAddr)
	f, err := os.Create(m.Dir + "/big")
	if err != nil {
		t.Fatal(err)
	}
	chunk := make([]byte, 1<<20)
	total := 0
	for err == nil && total < 100 {
		if _, err = f.Write(chunk); err == nil {
			total++
		}
	}
	err = errors.Join(err, f.Close())
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("after %d MiB: %v, want ENOSPC", total, err)
	}
	if total < 40 {
		t.Fatalf("only %d MiB fit", total)
	}
	harness.Await(t, "df shows a full file system", func() bool {
		var st unix.Statfs_t
		return unix.Statfs(m.Dir, &st) == nil && int64(st.Bavail)*st.Bsize < 24<<20
	})
	if err := os.Remove(m.Dir + "/big"); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "df shows the space again", func() bool {
		var st unix.Statfs_t
		return unix.Statfs(m.Dir, &st) == nil && int64(st.Bavail)*st.Bsize > 48<<20
	})
	harness.Await(t, "there is room again", func() bool { return os.WriteFile(m.Dir+"/small", chunk, 0o644) == nil })
	m.Unmount()
}

// TestSignals: SIGTERM to the serving process unmounts, also when somebody uses the mount.
func TestSignals(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 1})
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprint("busy ", busy), func(t *testing.T) {
			dir := harness.Dir(t)
			log := filepath.Join(harness.Dir(t), "log")
			harness.Weft(t, "mount", "-o", "log="+log, v.Addr+":/", dir)
			if err := os.WriteFile(dir+"/f", []byte("bytes"), 0o644); err != nil {
				t.Fatal(err)
			}
			var f *os.File
			if busy {
				var err error
				if f, err = os.Open(dir + "/f"); err != nil {
					t.Fatal(err)
				}
			}
			var st []struct{ PID int }
			unmarshal(t, harness.Weft(t, "status", dir, "--json"), &st)
			if err := unix.Kill(st[0].PID, unix.SIGTERM); err != nil {
				t.Fatal(err)
			}
			harness.Await(t, "the mount is gone", func() bool { return !harness.Mounted(dir) })
			if busy {
				// A second one leaves alone what is mounted there now.
				harness.Weft(t, "mount", "-o", "log="+log+"2", v.Addr+":/", dir)
				if err := unix.Kill(st[0].PID, unix.SIGTERM); err != nil {
					t.Fatal(err)
				}
				harness.Await(t, "the second signal", func() bool {
					said, _ := os.ReadFile(log)
					return bytes.Contains(said, []byte("detached already"))
				})
				harness.Weft(t, "umount", dir)
				b := make([]byte, 5)
				if _, err := f.ReadAt(b, 0); err != nil || string(b) != "bytes" {
					t.Errorf("an open file of a detached mount: %q, %v", b, err)
				}
				f.Close()
			}
			harness.Await(t, "the process has ended", func() bool { return unix.Kill(st[0].PID, 0) == unix.ESRCH })
			said, _ := os.ReadFile(log)
			if busy && !bytes.Contains(said, []byte("busy")) {
				t.Errorf("the log does not say that the mount was busy:\n%s", said)
			}
		})
	}
}

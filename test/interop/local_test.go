package interop

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// localDevice is what weft status says of a device, as far as it is looked at here.
type localDevice struct {
	Local    bool
	Reason   string
	OpsLocal uint64 `json:"ops_local"`
	OpsRPC   uint64 `json:"ops_rpc"`
}

// localAt returns what a mount with one device says of it.
func localAt(t *testing.T, m *harness.Mount) (d localDevice) {
	t.Helper()
	harness.Await(t, "weft status", func() bool { // a mount is there before it listens to that, and before it has looked
		out, err := exec.Command(harness.Bin(t, "weft"), "status", "--json", m.Dir).Output()
		var st []struct{ Devices []localDevice }
		if err != nil || json.Unmarshal(out, &st) != nil || len(st) != 1 || len(st[0].Devices) != 1 || st[0].Devices[0].Reason == "" {
			return false
		}
		d = st[0].Devices[0]
		return true
	})
	return d
}

// dataFile is the data file of a small file, in the exported directory.
func dataFile(t *testing.T, export, path string) string {
	t.Helper()
	servers := harness.LayoutOf(t, path).Mirrors[0].Servers
	return filepath.Join(export, servers[0].DataFile)
}

// TestGaneshaLocal has a directory of this host be what NFS-Ganesha exports, as is said and verified: what is read goes by the
// directory, what is written by RPC, and both are one.
func TestGaneshaLocal(t *testing.T) {
	base := harness.Dir(t)
	dir, wrong := subdir(t, base, "one"), subdir(t, base, "two")
	g := startGanesha(t, export{dir, open})
	addr := harness.FreeAddr(t)
	harness.Spawn(t, "weftd", "meta", "--dir", harness.Dir(t), "--listen", addr)
	harness.AwaitListen(t, addr)
	harness.Weft(t, "admin", "device", "add", "--server", addr, "nfs://127.0.0.1:"+g.nfs+dir+"?mountport="+g.mount)

	statement := "local-export=127.0.0.1:" + dir + "="
	near, far := harness.MountAt(t, addr, statement+dir), harness.MountAt(t, addr)
	const why = "none of weft's"
	if d := localAt(t, near); !d.Local || !strings.Contains(d.Reason, why) {
		t.Fatalf("with a true statement: %+v", d)
	}
	if out := harness.Weft(t, "status", near.Dir); !strings.Contains(out, "local: yes, for reading only, because ") {
		t.Errorf("status:\n%s", out)
	}
	if d := localAt(t, far); d.Local || !strings.Contains(d.Reason, why) {
		t.Errorf("without a statement: %+v", d)
	}

	t.Run("wrong", func(t *testing.T) {
		for _, o := range []string{statement + wrong, statement + base, statement + "/dev/shm", statement + dir + "/none"} {
			m := harness.MountAt(t, addr, o)
			if d := localAt(t, m); d.Local || !strings.HasPrefix(d.Reason, o+": ") {
				t.Errorf("%s: %+v", o, d)
			}
			if out := harness.Weft(t, "status", m.Dir); !strings.Contains(out, "local: no, because "+o+": ") {
				t.Errorf("status:\n%s", out)
			}
			if err := os.WriteFile(m.Dir+"/wrong", []byte("by RPC"), 0o644); err != nil {
				t.Error(err)
			}
			if got, err := os.ReadFile(m.Dir + "/wrong"); err != nil || string(got) != "by RPC" {
				t.Errorf("%q, %v", got, err)
			}
			if n := strings.Count(m.Log(), o+": "); n != 1 {
				t.Errorf("%d lines about the statement in the log:\n%s", n, m.Log())
			}
			m.Unmount()
		}
		m := harness.MountAt(t, addr, "local-export=127.0.0.2:"+dir+"="+dir)
		if d := localAt(t, m); d.Local || !strings.Contains(d.Reason, why) || !strings.Contains(m.Log(), "no data server of that address") {
			t.Errorf("a statement about another server: %+v\n%s", d, m.Log())
		}
		m.Unmount()
		for _, d := range []string{dir, wrong, base, "/dev/shm"} {
			if left, _ := filepath.Glob(d + "/.weft-local-*"); left != nil {
				t.Errorf("left behind: %v", left)
			}
		}
	})

	t.Run("contents", func(t *testing.T) {
		const size = 8 << 20
		want := make([]byte, size)
		random := rand.NewChaCha8([32]byte{1})
		random.Read(want)
		if err := os.WriteFile(far.Dir+"/file", want, 0o644); err != nil {
			t.Fatal(err)
		}
		w, err := os.OpenFile(far.Dir+"/file", os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		r, err := os.OpenFile(near.Dir+"/file", os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got := make([]byte, size)
		for i := range 100 { // each sees what was written before, whoever has
			off, n := rand.IntN(size), 1+rand.IntN(256<<10)
			part := want[off:min(off+n, size)]
			random.Read(part)
			writer := []*os.File{w, r}[i%2]
			if _, err := writer.WriteAt(part, int64(off)); err != nil {
				t.Fatal(err)
			}
			if _, err := r.ReadAt(got[:len(part)], int64(off)); err != nil || !bytes.Equal(got[:len(part)], part) {
				t.Fatalf("%d bytes at %d, %v: contents differ", len(part), off, err)
			}
		}
		if _, err := r.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("contents differ, %v", err)
		}
		if err := w.Truncate(1000); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(near.Dir + "/file"); err != nil || !bytes.Equal(b, want[:1000]) {
			t.Errorf("%d bytes after a cut, %v", len(b), err)
		}
		if d := localAt(t, near); d.OpsLocal == 0 || d.OpsRPC == 0 {
			t.Errorf("reads by the directory and writes by RPC: %+v", d)
		}
		if d := localAt(t, far); d.OpsLocal != 0 {
			t.Errorf("without a statement: %+v", d)
		}
	})

	t.Run("calls", func(t *testing.T) {
		harness.Need(t, "strace")
		want := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
		if err := os.WriteFile(near.Dir+"/calls", want, 0o644); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, "sync", near.Dir)
		sockets := regexp.MustCompile(`<TCP[^>]*->[^>]*:` + g.nfs + `\]>`)
		files := regexp.MustCompile(`(pread|io_uring_enter)[^(]*\(`)
		// Between two looks, of which each new connection causes one.
		harness.Await(t, "reads without calls to the data server", func() bool {
			b := traced(t, near, func() {
				if got, err := os.ReadFile(near.Dir + "/calls"); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			})
			return files.Match(b) && !sockets.Match(b)
		})
	})

	t.Run("fence", func(t *testing.T) {
		if err := os.WriteFile(near.Dir+"/fenced", []byte("contents"), 0o644); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, "sync", near.Dir)
		f, err := os.Open(near.Dir + "/fenced")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 8)
		if _, err := f.ReadAt(b, 0); err != nil || string(b) != "contents" {
			t.Fatalf("%q, %v", b, err)
		}
		path := dataFile(t, dir, near.Dir+"/fenced")
		var st syscall.Stat_t
		if err := syscall.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		before := localAt(t, near)
		// As the service does it, which tells nobody who does not answer.
		if err := os.Chown(path, int(st.Uid)+1, int(st.Gid)+1); err != nil {
			t.Fatal(err)
		}
		read := make(chan error, 1)
		clear(b)
		go func() { // ends with the process that serves the mount, if not before
			_, err := f.ReadAt(b, 0)
			read <- err
		}()
		harness.Await(t, "the data server's own answer", func() bool { return localAt(t, near).OpsRPC > before.OpsRPC })
		if d := localAt(t, near); d.OpsLocal != before.OpsLocal {
			t.Errorf("%d reads by the directory after the fence", d.OpsLocal-before.OpsLocal)
		}
		if err := os.Chown(path, int(st.Uid), int(st.Gid)); err != nil {
			t.Fatal(err)
		}
		if err := <-read; err == nil && string(b) != "contents" {
			t.Errorf("%q", b)
		}
	})

	t.Run("replaced", func(t *testing.T) {
		for i, replace := range []func(path string) error{
			func(path string) error { return os.Symlink("/etc/passwd", path) },
			func(path string) error { return os.WriteFile(path, []byte("not the contents"), 0o640) },
		} {
			name := fmt.Sprint(near.Dir, "/replaced", i)
			if err := os.WriteFile(name, []byte("contents"), 0o644); err != nil {
				t.Fatal(err)
			}
			harness.Weft(t, "sync", near.Dir)
			path := dataFile(t, dir, name)
			var st syscall.Stat_t
			if err := syscall.Stat(path, &st); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := replace(path); err != nil {
				t.Fatal(err)
			}
			if err := os.Lchown(path, int(st.Uid), int(st.Gid)); err != nil {
				t.Fatal(err)
			}
			before := localAt(t, near)
			f, err := os.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 8)
			n, err := f.ReadAt(b, 0)
			f.Close()
			// The server may still have the old one open.
			if err == nil && string(b[:n]) != "contents" {
				t.Errorf("%d: %q", i, b[:n])
			}
			if d := localAt(t, near); d.OpsLocal != before.OpsLocal {
				t.Errorf("%d: read by the directory", i)
			}
		}
	})

	t.Run("restart", func(t *testing.T) {
		want := bytes.Repeat([]byte("weft"), 1<<18)
		if err := os.WriteFile(near.Dir+"/restart", want, 0o644); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, "sync", near.Dir)
		g.kill()
		g.start()
		if got, err := os.ReadFile(far.Dir + "/restart"); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes by RPC, %v", len(got), err)
		}
		harness.Await(t, "reads by the directory", func() bool {
			before := localAt(t, near)
			if got, err := os.ReadFile(near.Dir + "/restart"); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			return localAt(t, near).OpsLocal > before.OpsLocal
		})
	})
	near.Unmount()
	far.Unmount()
	if left, _ := filepath.Glob(dir + "/.weft-local-*"); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

// TestKernelLocal has a directory be what the kernel's server on the same host exports, on several file systems. Client, metadata
// service and server are in the virtual machine.
func TestKernelLocal(t *testing.T) {
	for _, fs := range []string{"tmpfs", "ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			share := harness.Dir(t)
			harness.Run(t, "", "cp", harness.Bin(t, "weft"), harness.Bin(t, "weftd"), share)
			harness.StartVM(t, "--fs", fs, "--share", share)
			harness.Guest(t, `
				mkdir -p /tmp/meta /mnt/near /mnt/far /mnt/wrong
				/share/weftd meta --dir /tmp/meta --listen 127.0.0.1:7049 >/tmp/meta.log 2>&1 </dev/null &
				for i in $(seq 100); do
					/share/weft admin device ls --server 127.0.0.1:7049 >/dev/null 2>&1 && break
					sleep 0.2
				done
				/share/weft admin device add --server 127.0.0.1:7049 nfs://127.0.0.1/export/ds0
				/share/weft mount -o local-export=127.0.0.1:/export/ds0=/export/ds0 127.0.0.1:/ /mnt/near
				/share/weft mount -o local-export=127.0.0.1:/export/ds0=/export/ds1 127.0.0.1:/ /mnt/wrong
				/share/weft mount 127.0.0.1:/ /mnt/far`)
			status := func(dir, want string) {
				t.Helper()
				var out string
				harness.Await(t, want, func() bool {
					out = harness.Guest(t, "/share/weft status "+dir)
					return strings.Contains(out, "local: ") && !strings.Contains(out, "not been asked yet")
				})
				if !regexp.MustCompile(want).MatchString(out) {
					t.Errorf("%s: want %s in\n%s", dir, want, out)
				}
			}
			status("/mnt/near", "local: yes, for reading only, because ")
			status("/mnt/wrong", "local: no, because local-export=127.0.0.1:/export/ds0=/export/ds1: .* is not in the export")
			// Each reader sees what was written before, though the server has not made it stable.
			harness.Guest(t, `
				for i in 1 2 3 4 5; do
					for d in far near; do
						head -c 3000000 /dev/urandom >/tmp/want
						cat /tmp/want >/mnt/$d/file
						for r in near far wrong; do cmp /tmp/want /mnt/$r/file; done
						dd if=/tmp/want of=/mnt/$d/file bs=5000 count=7 seek=11 conv=notrunc status=none
						dd if=/tmp/want of=/tmp/want.2 bs=5000 count=7 status=none
						dd if=/mnt/near/file bs=5000 skip=11 count=7 status=none | cmp - /tmp/want.2
					done
				done`)
			status("/mnt/near", "; [1-9][0-9]* requests without RPC, [1-9]")
			// A fence, as the service makes it.
			out := harness.Guest(t, `
				echo contents >/mnt/near/fenced
				/share/weft sync /mnt/near
				exec 3</mnt/near/fenced
				head -c 3 <&3
				count() { /share/weft status --json /mnt/near | tr -d ' \n' | sed 's/.*"ops_local":\([0-9]*\).*/\1/'; }
				before=$(count)
				find /export/ds0/weft-* -type f ! -name 'device-*' -exec chown 77:78 {} +
				timeout 3 head -c 5 <&3 || true
				echo " $(($(count) - before))"`)
			if out != "con 0\n" {
				t.Errorf("a fenced reader: %q", out)
			}
			if left := harness.Guest(t, "find /export -name '.weft-local-*'"); left != "" {
				t.Errorf("left behind: %s", left)
			}
		})
	}
}

// traced returns the system calls that a mount's serving process makes while do runs.
func traced(t *testing.T, m *harness.Mount, do func()) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "trace")
	trace := exec.Command("strace", "-f", "-yy", "-s", "0", "-e", "trace=%network,read,write,readv,writev,pread64,preadv,preadv2,io_uring_enter",
		"-o", out, "-p", fmt.Sprint(m.Pid()))
	trace.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := trace.Start(); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "strace", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.Pid()))
		return err == nil && !strings.Contains(string(b), "TracerPid:\t0\n")
	})
	do()
	trace.Process.Signal(syscall.SIGINT)
	if err := trace.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

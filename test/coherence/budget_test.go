package coherence

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/test/harness"
)

// tap passes on what a client and the metadata service say, and counts the client's calls.
type tap struct {
	addr string
	mu   sync.Mutex
	seen map[metarpc.Op]int
}

func newTap(t *testing.T, service string) *tap {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	p := &tap{addr: l.Addr().String(), seen: map[metarpc.Op]int{}}
	go func() { // ends with the listener
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", service)
			if err != nil {
				client.Close()
				continue
			}
			go func() { // ends with the connection, as the other one does
				io.Copy(client, server)
				client.Close()
			}()
			go func() {
				p.pass(client, server)
				server.Close()
			}()
		}
	}()
	return p
}

func (p *tap) pass(client, server net.Conn) {
	for {
		frame, err := metarpc.ReadFrame(client, nil, metarpc.MaxFrame)
		if err != nil {
			return
		}
		if kind, _ := metarpc.FrameKind(frame); kind == metarpc.KindCall {
			if h, _, err := metarpc.ParseCall(frame, metarpc.Version); err == nil && h.Op != metarpc.OpRenew {
				p.mu.Lock()
				p.seen[h.Op]++
				p.mu.Unlock()
			}
		}
		n := len(frame)
		if _, err := server.Write(append([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, frame...)); err != nil {
			return
		}
	}
}

// take returns the counts since the last time.
func (p *tap) take() map[metarpc.Op]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := p.seen
	p.seen = map[metarpc.Op]int{}
	return seen
}

// settle is when the calls that are put off are over: a file is made stable about a second after it was written. It is also longer than
// anybody may keep an answer without a lease.
const settle = 2 * time.Second

// gather is how long what is given back adds up for one call; a machine that is slow makes more calls of the same work.
const gather = 20 * time.Millisecond

// TestCalls holds how many calls to the metadata service common things cost, those that are put off included, on average of
// some repetitions.
func TestCalls(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	if v.Cluster != nil {
		t.Skip("several services: a mount learns where the others are, and goes past who counts its calls")
	}
	p := newTap(t, v.Addr)
	m, other := harness.MountAt(t, p.addr, mountOptions()...), v.Mount(mountOptions()...)
	const n = 20
	many := func(format string, do func(path string) error) func(dir string) error {
		return func(dir string) error {
			var err error
			for i := range n {
				err = errors.Join(err, do(filepath.Join(dir, fmt.Sprintf(format, i))))
			}
			return err
		}
	}
	create := func(path string) error { return os.WriteFile(path, []byte("contents"), 0o644) }
	stat := func(path string) error { return unix.Stat(path, new(unix.Stat_t)) }
	read := func(path string) error {
		_, err := os.ReadFile(path)
		return err
	}
	missing := func(path string) error { return ignored(stat(path), unix.ENOENT) }
	all := func(dir string) error {
		entries, err := os.ReadDir(dir)
		for _, e := range entries {
			err = errors.Join(err, stat(filepath.Join(dir, e.Name())))
		}
		return err
	}
	thousand := func(dir string) error {
		var err error
		for i := range 1000 {
			err = errors.Join(err, unix.Mknod(filepath.Join(dir, fmt.Sprint(i)), unix.S_IFREG|0o644, 0))
		}
		return err
	}
	nothing := func(string) error { return nil }
	both := func(one, two func(string) error) func(string) error {
		return func(dir string) error { return errors.Join(one(dir), two(dir)) }
	}
	rows := []struct {
		name    string
		other   func(dir string) error // done before through another mount
		mine    func(dir string) error // and then through this one
		do      func(dir string) error // what is counted
		each    float64                // done so many times
		budget  float64                // calls for each
		settles bool                   // some calls are put off
	}{
		{"stat a known file", nothing, both(many("f%d", create), many("f%d", stat)), many("f%d", stat), n, 0, false},
		{"stat another one's file", many("f%d", create), nothing, many("f%d", stat), n, 1.2, false},
		{"a name known to be missing", nothing, many("f%d", missing), many("f%d", missing), n, 0, false},
		{"open, read, close a known file", nothing, both(many("f%d", create), many("f%d", read)), many("f%d", read), n, 2.2, true},
		{"create, write, close", nothing, nothing, many("f%d", create), n, 4.5, true},
		{"ls -l of 1000 files of another one", thousand, nothing, all, 1, 10, false},
		{"ls -l of 1000 files again", thousand, all, all, 1, 10, false},
		{"rename", nothing, many("f%d", create), many("f%d", func(path string) error { return os.Rename(path, path+"-new") }), n, 3.2, true},
		{"unlink", nothing, many("f%d", create), many("f%d", os.Remove), n, 2.2, true},
		{"mkdir", nothing, nothing, many("d%d", func(path string) error { return os.Mkdir(path, 0o755) }), n, 3.2, false},
	}
	for i, r := range rows {
		dir := fmt.Sprint("/", i)
		if err := errors.Join(os.Mkdir(other.Dir+dir, 0o755), r.other(other.Dir+dir), r.mine(m.Dir+dir)); err != nil {
			t.Fatalf("%s: %v", r.name, err)
		}
	}
	time.Sleep(settle)
	for i, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			if err := stat(fmt.Sprint(m.Dir, "/", i)); err != nil { // the way there does not count
				t.Fatal(err)
			}
			p.take()
			begun := time.Now()
			if err := r.do(fmt.Sprint(m.Dir, "/", i)); err != nil {
				t.Fatal(err)
			}
			batches := 2 + int(time.Since(begun)/gather) // at most, of each kind
			if r.settles {
				time.Sleep(settle)
			}
			seen := p.take()
			total := 0
			var counts []string
			for _, op := range slices.Sorted(maps.Keys(seen)) {
				if op != metarpc.OpClose && op != metarpc.OpLayoutReturn {
					total += seen[op]
				} else if seen[op] > batches {
					t.Errorf("%v was called %d times, want at most %d", op, seen[op], batches)
				}
				counts = append(counts, fmt.Sprintf("%v %d", op, seen[op]))
			}
			each := float64(total) / r.each
			t.Logf("%.2f calls, without those that give back (%s for %v)", each, strings.Join(counts, ", "), r.each)
			if each > r.budget {
				t.Errorf("%.2f calls each, want at most %v", each, r.budget)
			}
		})
	}
}

func ignored(err, harmless error) error {
	if errors.Is(err, harmless) {
		return nil
	}
	return err
}

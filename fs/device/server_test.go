package device

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// eachWait runs a test with both ways to wait for requests.
func eachWait(t *testing.T, f func(t *testing.T)) {
	t.Run("poll", f)
	t.Run("poller", func(t *testing.T) {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
		f(t)
	})
}

func TestTransfers(t *testing.T) {
	eachWait(t, func(t *testing.T) {
		k := newKernel(t)
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		rnd := rand.New(rand.NewPCG(seed, 0))
		for range 300 {
			off := rnd.Uint64N(1 << 40)
			n := rnd.IntN(testMaxWrite + 1)
			if rnd.IntN(2) == 0 {
				n = 1 + rnd.IntN(8192)
			}
			want := make([]byte, n)
			pattern(want, int64(off))
			if rnd.IntN(2) == 0 {
				out := k.expect(k.write(off, want), 0)
				if len(out) != writeOutSize || binary.NativeEndian.Uint32(out) != uint32(n) {
					t.Fatalf("WRITE of %d bytes: %x", n, out)
				}
			} else if got := k.expect(k.read(off, n), 0); !bytes.Equal(got, want) {
				t.Fatalf("READ of %d bytes at %d: %d bytes, not those", n, off, len(got))
			}
		}
		k.settle()
	})
}

// Requests that lie there together are one batch.
func TestBatch(t *testing.T) {
	k := newKernel(t)
	k.h.held.Store(true)
	const n = 20
	var sent []byte
	for range n {
		sent = k.transfer(opRead, 0, 4096, nil)
		k.send(sent)
	}
	k.h.await(n)
	k.h.held.Store(false)
	k.h.release()
	got := map[uint64]bool{}
	for range n {
		a := k.receive()
		if a.errno != 0 || len(a.data) != 4096 || got[a.unique] {
			t.Fatalf("%+v", a)
		}
		got[a.unique] = true
	}
	// How many there were together is chance, but an answer needs a batch that ended.
	if f := k.h.flushes.Load(); f < 1 || f > n {
		t.Errorf("%d batches of %d requests", f, n)
	}
}

func TestNonsense(t *testing.T) {
	k := newKernel(t)
	e := binary.NativeEndian
	k.send([]byte{1})
	k.send(make([]byte, 39))
	k.send(make([]byte, 40))
	k.send(make([]byte, 4000))
	b := k.transfer(opRead, 0, 4096, nil)
	e.PutUint32(b, uint32(len(b)+1)) // a length that is not the message's
	k.send(b)
	b = k.transfer(opRead, 0, 4096, nil)
	e.PutUint64(b[8:], 0) // a number that would make the answer a notification
	k.send(b)
	k.silent()
	for _, c := range []struct {
		what  string
		b     func() []byte
		errno syscall.Errno
	}{
		{"READ without arguments", func() []byte { return k.message(opRead, nil) }, syscall.EIO},
		{"READ cut short", func() []byte { return k.message(opRead, make([]byte, 39)) }, syscall.EIO},
		{"WRITE cut short", func() []byte { return k.message(opWrite, make([]byte, 39)) }, syscall.EIO},
		{"READ too large", func() []byte { return k.transfer(opRead, 0, testMaxWrite+1, nil) }, syscall.EINVAL},
		{"READ at a negative offset", func() []byte { return k.transfer(opRead, 1<<63, 1, nil) }, syscall.EINVAL},
		{"READ beyond all offsets", func() []byte { return k.transfer(opRead, 1<<63-1, 1, nil) }, syscall.EINVAL},
		{"WRITE with less data", func() []byte { return k.transfer(opWrite, 0, 10, make([]byte, 9)) }, syscall.EIO},
		{"WRITE with more data", func() []byte { return k.transfer(opWrite, 0, 10, make([]byte, 11)) }, syscall.EIO},
		{"LOOKUP without a name", func() []byte { return k.message(1, nil) }, syscall.ENOSYS},
		{"SETATTR cut short", func() []byte { return k.message(4, make([]byte, 5)) }, syscall.EIO},
		{"READDIR of 4 GiB", func() []byte { return k.transfer(opReaddir, 0, 1<<32-1, nil) }, syscall.EINVAL},
		{"READDIR cut short", func() []byte { return k.message(opReaddir, make([]byte, 5)) }, syscall.EIO},
		{"GETXATTR of 4 GiB", func() []byte { return k.message(opGetxattr, bytes.Repeat([]byte{255}, 8)) }, syscall.EINVAL},
		{"an operation that there is not", func() []byte { return k.message(5000, make([]byte, 100)) }, syscall.ENOSYS},
	} {
		k.send(c.b())
		if a := k.receive(); a.unique != k.last || a.errno != c.errno || len(a.data) != 0 {
			t.Errorf("%s: %+v, want %v", c.what, a, c.errno)
		}
	}
	k.send(k.message(opForget, make([]byte, 8)))
	k.send(k.message(opBatchForget, make([]byte, 8)))
	k.send(k.message(opForget, nil))
	k.send(k.message(opInterrupt, nil))
	k.send(k.message(opInterrupt, make([]byte, 8)))
	k.silent()
	k.expect(k.read(0, 4096), 0)
}

func TestFirstRequest(t *testing.T) {
	var k kernel
	for _, first := range [][]byte{{}, make([]byte, 40), k.transfer(opRead, 0, 10, nil), k.message(opInit, make([]byte, 3))} {
		pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET, 0)
		ok(t, err)
		_, err = syscall.Write(pair[0], first)
		ok(t, err)
		syscall.Close(pair[0])
		s, err := New(Config{
			FD: pair[1], FileSystem: fuse.NewDefaultRawFileSystem(), Handler: newTestHandler(), Memory: 16 << 20,
			Options: &fuse.MountOptions{Name: "test", MaxWrite: testMaxWrite},
		})
		if err == nil {
			t.Errorf("%x was taken for an INIT: %v", first, s.kernel)
		}
		if err := syscall.Close(pair[1]); err == nil {
			t.Error("the device was left open")
		}
	}
}

func TestInterrupt(t *testing.T) {
	eachWait(t, func(t *testing.T) {
		k := newKernel(t)
		k.h.held.Store(true)
		// The caller lives: nothing happens.
		u := k.read(0, 100)
		k.h.await(1)
		k.interrupt(u)
		k.interrupt(u)
		for k.h.watched.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		k.silent()
		k.h.release()
		k.expect(u, 0)
		// It is dying: the request is answered at once, and its Done, which comes later, answers nothing.
		k.h.gone.Store(true)
		for _, start := range []func() uint64{
			func() uint64 { return k.read(0, 100) },
			func() uint64 { return k.write(0, make([]byte, 100)) },
			func() uint64 { return k.write(0, make([]byte, testMaxWrite)) },
		} {
			u := start()
			k.h.await(1)
			k.interrupt(u)
			k.expect(u, syscall.EINTR)
			k.settle()
			k.h.release()
			k.silent()
		}
		if k.h.detached != 3 {
			t.Errorf("%d requests were detached, want 3", k.h.detached)
		}
		// One that is not known must be repeated, so that one that comes before its request is not lost.
		k.interrupt(4710)
		k.expect(4710|1, syscall.EAGAIN)
	})
}

// blocking is a file system whose STATFS waits for an interrupt.
type blocking struct{ fuse.RawFileSystem }

func (blocking) StatFs(cancel <-chan struct{}, _ *fuse.InHeader, _ *fuse.StatfsOut) fuse.Status {
	<-cancel
	return fuse.EINTR
}

func TestInterruptOthers(t *testing.T) {
	k := newKernel(t, func(c *Config) { c.FileSystem = blocking{fuse.NewDefaultRawFileSystem()} })
	k.send(k.message(17, nil))
	u := k.last
	k.silent()
	for done := false; !done; {
		k.interrupt(u)
		switch a := k.receive(); {
		case a.unique == u|1 && a.errno == syscall.EAGAIN: // the handler has not begun
		case a.unique == u && a.errno == syscall.EINTR:
			done = true
		default:
			t.Fatalf("%+v", a)
		}
	}
	k.send(k.message(17, nil)) // the end of the mount interrupts it
	k.silent()
	k.unmount()
}

// READs without memory wait for others to end, and nothing else does.
func TestMemoryForReads(t *testing.T) {
	k := newKernel(t, func(c *Config) { c.Memory = 1 })
	k.h.held.Store(true)
	fit := int(k.s.reads.Limit() / testMaxWrite)
	const more = 5
	var all []uint64
	for range fit + more {
		all = append(all, k.read(0, testMaxWrite))
	}
	k.h.await(fit)
	k.silent()
	// One of those that wait goes away.
	k.h.gone.Store(true)
	k.interrupt(all[fit+2])
	k.expect(all[fit+2], syscall.EINTR)
	k.h.gone.Store(false)
	all = append(all[:fit+2], all[fit+3:]...)
	k.h.mu.Lock()
	n, detached := len(k.h.started), k.h.detached
	k.h.mu.Unlock()
	if n != fit || detached != 0 {
		t.Errorf("%d READs under way, want %d; %d detached", n, fit, detached)
	}
	got := map[uint64]bool{}
	for range all {
		k.h.await(1)
		k.h.endOne() // a socket takes few such answers at once
		a := k.receive()
		if a.errno != 0 || len(a.data) != testMaxWrite || got[a.unique] {
			t.Fatalf("READ %d: %v, %d bytes", a.unique, a.errno, len(a.data))
		}
		got[a.unique] = true
	}
}

// WRITEs without memory stay in the kernel, until others end or their callers die.
func TestMemoryForWrites(t *testing.T) {
	for _, dying := range []bool{false, true} {
		t.Run(fmt.Sprint("dying=", dying), func(t *testing.T) {
			k := newKernel(t, func(c *Config) { c.Memory = 1 })
			k.h.held.Store(true)
			fit := int(k.s.writes.Limit()/testMaxWrite) + 1 // the last one's reader waits for memory with it
			data := make([]byte, testMaxWrite)
			pattern(data, 0)
			want := map[uint64]bool{}
			sent := make(chan struct{})
			go func() { // ends when the server has read everything
				defer close(sent)
				for range fit + 10 {
					k.send(k.transfer(opWrite, 0, len(data), data))
				}
			}()
			k.h.await(fit - k.s.readers)
			for k.s.starving.Load() < int32(k.s.readers) {
				time.Sleep(time.Millisecond)
			}
			if used := k.s.writes.Used(); used > k.s.writes.Limit() {
				t.Errorf("%d bytes in use of %d", used, k.s.writes.Limit())
			}
			errno := syscall.Errno(0)
			if dying {
				errno = syscall.EINTR
				k.h.gone.Store(true)
			} else {
				k.h.held.Store(false)
				k.h.release()
			}
			for n := 0; n < fit+10; n++ {
				if dying && n >= fit-k.s.readers {
					k.h.held.Store(false) // of those that are left some are interrupted, and some are not
					k.h.release()
				}
				a := k.receive()
				if want[a.unique] || a.errno != errno && a.errno != 0 {
					t.Fatalf("WRITE %d: %v", a.unique, a.errno)
				}
				want[a.unique] = true
			}
			<-sent
			if dying {
				k.h.release() // the late ends of those that were interrupted
			}
		})
	}
}

// The end of the mount does not wait for servers.
func TestEnd(t *testing.T) {
	eachWait(t, func(t *testing.T) {
		k := newKernel(t)
		k.h.held.Store(true)
		k.read(0, 4096)
		k.write(0, make([]byte, 10))
		k.write(0, make([]byte, testMaxWrite))
		k.h.await(3)
		k.h.gone.Store(true) // as the mount is
		k.unmount()
		if k.h.detached != 3 {
			t.Errorf("%d requests were detached, want 3", k.h.detached)
		}
		k.h.release() // late
	})
}

package nvmetcp

import (
	"bytes"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// TestRetryAfterReplacement: a write that waits to be repeated on its path, whose namespace is replaced meanwhile by another one
// with its number, is not carried out on that.
func TestRetryAfterReplacement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA)
		_, n := f.use(nil)
		synctest.Wait()
		f.set(addrA, func(p *fakePort) {
			p.answer = func(*Command) (error, bool) {
				e := testStatus(wire.StatusInternal, false)
				e.Delay = 5 * time.Second
				return e, true
			}
		})
		r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		time.Sleep(time.Second)
		other := newFakeSpace(9, 4096, 1)
		f.set(addrA, func(p *fakePort) {
			p.answer = nil
			p.spaces = map[uint32]*fakeSpace{1: other}
		}).event(wire.EventNamespaceChanged)
		if err := r.wait(t); err == nil {
			t.Error("it succeeded")
		}
		if !bytes.Equal(other.data, make([]byte, len(other.data))) {
			t.Error("the other namespace was written to")
		}
	})
}

// TestStartDuringReconnect: a write that is just being started when its connection is lost and made again does not go to what is there
// then before that was looked at.
func TestStartDuringReconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA)
		_, n := f.use(nil)
		synctest.Wait()
		other := newFakeSpace(9, 4096, 1)
		c := f.ctl(addrA)
		c.pause = func() {
			f.set(addrA, func(p *fakePort) { p.spaces = map[uint32]*fakeSpace{1: other} })
			c.cut(nil)
			c.back()
		}
		if err := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n).wait(t); err == nil {
			t.Error("it succeeded")
		}
		if !bytes.Equal(other.data, make([]byte, len(other.data))) {
			t.Error("the other namespace was written to")
		}
	})
}

// TestAssociation: a command for one association is not sent on another.
func TestAssociation(t *testing.T) {
	p := newPeer(t)
	c := p.host(nil)
	cmd := readCommand(0, 512)
	cmd.Association = c.Info().Association
	if err := do(t, c, cmd); err != nil {
		t.Fatal(err)
	}
	c.Reset("test")
	waittest.Until(t, "connected again", func() bool { return p.connects.Load() == 2 && c.State() == StateLive })
	var path *PathError
	if err := do(t, c, cmd); !errors.As(err, &path) || path.Sent {
		t.Errorf("on the next one: %v", err)
	}
	cmd.Association = c.Info().Association
	if err := do(t, c, cmd); err != nil {
		t.Fatal(err)
	}
}

// TestTransientIdentify: a status that asks for a retry, to the questions what a namespace is, makes it neither another one nor one that
// cannot be used: it is asked for again, and requests wait.
func TestTransientIdentify(t *testing.T) {
	for _, what := range []string{"namespace", "descriptors"} {
		for _, status := range []wire.Status{wire.StatusInternal, wire.StatusNotReady, wire.StatusPathInternal} {
			t.Run(what+" "+status.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := newFakeTarget(t, addrA)
					s, n := f.use(nil)
					synctest.Wait()
					f.set(addrA, func(p *fakePort) {
						p.admin = func(w string, _ uint32) error {
							if w == what {
								return testStatus(status, false)
							}
							return nil
						}
					})
					f.ctl(addrA).cut(nil)
					f.ctl(addrA).back()
					r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
					time.Sleep(5 * time.Second)
					f.set(addrA, func(p *fakePort) { p.admin = nil })
					if err := r.wait(t); err != nil {
						t.Fatal(err)
					}
					if now, err := s.Namespace(1); now != n {
						t.Errorf("the namespace is another one now: %v", err)
					}
				})
			})
		}
	}
}

// TestReusedWithoutAnswer: a command that is used again and has no answer does not show that of its last use.
func TestReusedWithoutAnswer(t *testing.T) {
	c := newController(Config{})
	cmd := &Command{Op: wire.OpFlush, NSID: 1, Status: wire.StatusReserved, Result: 7}
	if err := do(t, c, cmd); err == nil || cmd.Status != 0 || cmd.Result != 0 {
		t.Errorf("%v, status %v, result %d", err, cmd.Status, cmd.Result)
	}
}

package nvmetcp

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
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

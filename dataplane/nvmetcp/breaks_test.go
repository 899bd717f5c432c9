package nvmetcp

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// TestCommandThatBreaks: a command with which controllers break the protocol again and again ends, when it cannot be carried out any
// more; one whose connections are lost for other reasons is repeated for ever.
func TestCommandThatBreaks(t *testing.T) {
	for name, c := range map[string]struct {
		cause error
		ends  bool
	}{
		"protocol": {&wire.ProtocolError{What: "test"}, true},
		"TermReq":  {errTermReq, true},
		"network":  {errHungUp, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeTarget(t, addrA)
				_, n := f.use(nil)
				synctest.Wait()
				f.set(addrA, func(p *fakePort) { p.latency = time.Hour })
				ctl := f.ctl(addrA)
				ctl.cause = c.cause
				r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
				for i := range 5 {
					time.Sleep(time.Minute)
					if r.over() {
						t.Fatalf("ended after %d losses: %v", i, r.Err)
					}
					ctl.cut(nil)
					ctl.back()
				}
				time.Sleep(9 * time.Second)
				if r.over() {
					t.Errorf("ended though it may be carried out: %v", r.Err)
				}
				time.Sleep(time.Minute)
				if r.over() != c.ends || c.ends && !errors.Is(r.Err, c.cause) {
					t.Errorf("over is %v, %v", r.over(), r.Err)
				}
				if !c.ends {
					f.set(addrA, func(p *fakePort) { p.latency = time.Millisecond })
					ctl.cut(nil)
					ctl.back()
					if err := r.wait(t); err != nil {
						t.Error(err)
					}
				}
			})
		})
	}
}

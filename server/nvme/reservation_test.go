package nvme

import (
	"fmt"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// reserver is a host in a test of reservations.
type reserver struct {
	*hostQueue
	key uint64
}

func newReserver(t *testing.T, tgt *Target, id byte) *reserver {
	h := newHost(t, tgt.Addr(1), hostOptions{hostID: id, nqn: fmt.Sprint(hostNQN, id)})
	return &reserver{h.queue(1, 8), 100 + uint64(id)}
}

func (r *reserver) register(a wire.ReservationRegister) wire.Status {
	r.t.Helper()
	a.NSID = 1
	return r.status(a.Command(true), a.AppendData(nil), nil)
}

func (r *reserver) join() {
	r.t.Helper()
	if st := r.register(wire.ReservationRegister{New: r.key}); st != wire.StatusSuccess {
		r.t.Fatalf("register: %v", st)
	}
}

func (r *reserver) acquire(a wire.ReservationAcquire) wire.Status {
	r.t.Helper()
	if a.NSID = 1; a.Current == 0 {
		a.Current = r.key
	}
	return r.status(a.Command(false), nil, a.AppendData(nil))
}

func (r *reserver) release(a wire.ReservationRelease) wire.Status {
	r.t.Helper()
	if a.NSID = 1; a.Current == 0 {
		a.Current = r.key
	}
	return r.status(a.Command(true), a.AppendData(nil), nil)
}

func (r *reserver) report() (wire.ReservationStatus, map[byte]wire.Registrant) {
	r.t.Helper()
	_, b := r.ok(wire.ReservationReport{NSID: 1, Length: 4096, Extended: true}.Command(), nil, nil)
	var s wire.ReservationStatus
	if err := s.Decode(b, true); err != nil {
		r.t.Fatal(err)
	}
	got := map[byte]wire.Registrant{}
	for g, err := range wire.Registrants(b, true) {
		if err != nil {
			r.t.Fatal(err)
		}
		got[g.HostID[15]] = g
	}
	return s, got
}

// may tells what I/O of the host gets.
func (r *reserver) may() (reads, writes bool) {
	r.t.Helper()
	one := make([]byte, 512)
	statuses := map[string]wire.Status{
		"read":        r.status(read(1, 0, 1, 512), nil, nil),
		"large read":  r.status(read(1, 0, 256, 512), nil, nil),
		"write":       r.status(write(1, 0, 1, wire.CapsuleSGL(512)), one, nil),
		"large write": r.status(write(1, 0, 256, wire.TransportSGL(256*512)), nil, make([]byte, 256*512)),
		"flush":       r.status(flushCommand(1), nil, nil),
		"zero":        r.status(wire.Range{NSID: 1, Blocks: 1}.Command(wire.OpWriteZeroes, wire.NoSGL()), nil, nil),
		"deallocate":  r.status(wire.Deallocate(1, 1, true), wire.DSMRange{Blocks: 1}.Append(nil), nil),
	}
	reads, writes = statuses["read"] == wire.StatusSuccess, statuses["write"] == wire.StatusSuccess
	for name, st := range statuses {
		want := writes
		if name == "read" || name == "large read" {
			want = reads
		}
		if st != wire.StatusSuccess && st != wire.StatusReserved || (st == wire.StatusSuccess) != want {
			r.t.Errorf("%s: %v; reads %v, writes %v", name, st, reads, writes)
		}
	}
	return reads, writes
}

// TestReservationAccess is the table of who may do what, for the holder, another registrant, and who is none.
func TestReservationAccess(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	holder, other, none := newReserver(t, tgt, 1), newReserver(t, tgt, 2), newReserver(t, tgt, 3)
	holder.join()
	other.join()
	type access struct{ reads, writes bool }
	all, nothing, readOnly := access{true, true}, access{}, access{true, false}
	for kind, want := range map[wire.ReservationType][3]access{
		wire.ReserveNone:                     {all, all, all},
		wire.ReserveWriteExclusive:           {all, readOnly, readOnly},
		wire.ReserveExclusiveAccess:          {all, nothing, nothing},
		wire.ReserveWriteExclusiveRegistered: {all, all, readOnly},
		wire.ReserveExclusiveAccessRegisters: {all, all, nothing},
		wire.ReserveWriteExclusiveAll:        {all, all, readOnly},
		wire.ReserveExclusiveAccessAll:       {all, all, nothing},
	} {
		if kind != wire.ReserveNone {
			if st := holder.acquire(wire.ReservationAcquire{Type: kind}); st != wire.StatusSuccess {
				t.Fatalf("%v: acquire: %v", kind, st)
			}
			if st := holder.acquire(wire.ReservationAcquire{Type: kind}); st != wire.StatusSuccess {
				t.Errorf("%v: acquire again: %v", kind, st)
			}
			if st := none.acquire(wire.ReservationAcquire{Type: kind}); st != wire.StatusReserved {
				t.Errorf("%v: acquire without a key: %v", kind, st)
			}
			wantOther := wire.StatusReserved
			if shared(kind) {
				wantOther = wire.StatusSuccess // holds it already
			}
			if st := other.acquire(wire.ReservationAcquire{Type: kind}); st != wantOther {
				t.Errorf("%v: acquire by another: %v", kind, st)
			}
		}
		for i, r := range []*reserver{holder, other, none} {
			var got access
			if got.reads, got.writes = r.may(); got != want[i] {
				t.Errorf("%v: host %d may %+v, want %+v", kind, i+1, got, want[i])
			}
		}
		s, regs := none.report()
		if s.Type != kind || s.Registrants != 2 || regs[1].Key != 101 || regs[2].Key != 102 ||
			regs[1].Holder != (kind != wire.ReserveNone) || regs[2].Holder != shared(kind) {
			t.Errorf("%v: report: %+v %+v", kind, s, regs)
		}
		if kind != wire.ReserveNone {
			if st := holder.release(wire.ReservationRelease{Type: kind%6 + 1}); st != wire.StatusInvalidField {
				t.Errorf("%v: release of another type: %v", kind, st)
			}
			if st := holder.release(wire.ReservationRelease{Type: kind}); st != wire.StatusSuccess {
				t.Errorf("%v: release: %v", kind, st)
			}
		}
	}
}

func TestReservationKeys(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	a, b, c := newReserver(t, tgt, 1), newReserver(t, tgt, 2), newReserver(t, tgt, 3)
	expect := func(what string, got, want wire.Status) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	expect("register key 0", a.register(wire.ReservationRegister{}), wire.StatusInvalidField)
	expect("register for ever", a.register(wire.ReservationRegister{New: 1, Persist: wire.PersistOn}), wire.StatusInvalidField)
	expect("unregister nobody", a.register(wire.ReservationRegister{Action: wire.UnregisterKey}), wire.StatusReserved)
	expect("replace nothing", a.register(wire.ReservationRegister{Action: wire.ReplaceKey, IgnoreKey: true, New: 5}), wire.StatusReserved)
	a.join()
	a.join() // the same key again
	expect("another key", a.register(wire.ReservationRegister{New: 5}), wire.StatusReserved)
	expect("replace, wrong key", a.register(wire.ReservationRegister{Action: wire.ReplaceKey, Current: 4, New: 5}), wire.StatusReserved)
	expect("replace", a.register(wire.ReservationRegister{Action: wire.ReplaceKey, Current: a.key, New: 5}), wire.StatusSuccess)
	expect("replace, any key", a.register(wire.ReservationRegister{Action: wire.ReplaceKey, IgnoreKey: true, New: a.key}), wire.StatusSuccess)
	expect("unregister, wrong key", a.register(wire.ReservationRegister{Action: wire.UnregisterKey, Current: 4}), wire.StatusReserved)
	expect("acquire, wrong key", a.acquire(wire.ReservationAcquire{Type: 1, Current: 4}), wire.StatusReserved)
	expect("acquire type 7", a.acquire(wire.ReservationAcquire{Type: 7}), wire.StatusInvalidField)
	expect("release, wrong key", a.release(wire.ReservationRelease{Type: 1, Current: 4}), wire.StatusReserved)
	expect("release nothing", a.release(wire.ReservationRelease{Type: 1}), wire.StatusSuccess)

	// A holder that unregisters gives its reservation up.
	expect("acquire", a.acquire(wire.ReservationAcquire{Type: 3}), wire.StatusSuccess)
	expect("unregister", a.register(wire.ReservationRegister{Action: wire.UnregisterKey, Current: a.key}), wire.StatusSuccess)
	if s, regs := a.report(); s.Type != 0 || len(regs) != 0 {
		t.Errorf("after the holder has gone: %+v %v", s, regs)
	}

	// Preempt takes the reservation, and the registration of who had it.
	for _, action := range []wire.AcquireAction{wire.Preempt, wire.PreemptAndAbort} {
		a.join()
		b.join()
		expect("acquire", a.acquire(wire.ReservationAcquire{Type: 4}), wire.StatusSuccess)
		expect("preempt, no key", b.acquire(wire.ReservationAcquire{Action: action, Type: 4}), wire.StatusInvalidField)
		expect("preempt, unknown key", b.acquire(wire.ReservationAcquire{Action: action, Type: 4, Preempted: 77}), wire.StatusReserved)
		expect("preempt by who has no key", c.acquire(wire.ReservationAcquire{Action: action, Type: 4, Preempted: a.key}), wire.StatusReserved)
		before, _ := b.report()
		expect("preempt", b.acquire(wire.ReservationAcquire{Action: action, Type: 4, Preempted: a.key}), wire.StatusSuccess)
		s, regs := b.report()
		if s.Type != 4 || len(regs) != 1 || !regs[2].Holder || s.Generation == before.Generation {
			t.Errorf("after preempt: %+v %v; generation was %d", s, regs, before.Generation)
		}
		if reads, writes := a.may(); reads || writes {
			t.Error("who was preempted goes on")
		}
		// A registrant that holds nothing is taken out, and the reservation stays.
		a.join()
		expect("preempt a registrant", b.acquire(wire.ReservationAcquire{Action: action, Type: 4, Preempted: a.key}), wire.StatusSuccess)
		if s, regs := b.report(); s.Type != 4 || len(regs) != 1 {
			t.Errorf("after preempt of a registrant: %+v %v", s, regs)
		}
		// Itself: another type.
		expect("preempt itself", b.acquire(wire.ReservationAcquire{Action: action, Type: 2, Preempted: b.key}), wire.StatusSuccess)
		if s, regs := b.report(); s.Type != 2 || len(regs) != 1 {
			t.Errorf("after it preempted itself: %+v %v", s, regs)
		}
		expect("clear", b.release(wire.ReservationRelease{Action: wire.Clear}), wire.StatusSuccess)
		if s, regs := b.report(); s.Type != 0 || len(regs) != 0 {
			t.Errorf("after clear: %+v %v", s, regs)
		}
	}

	// All registrants: one is fenced by its key, the others hold it on; key 0 fences all others.
	a.join()
	b.join()
	c.join()
	expect("acquire", a.acquire(wire.ReservationAcquire{Type: 6}), wire.StatusSuccess)
	expect("preempt one", a.acquire(wire.ReservationAcquire{Action: wire.Preempt, Type: 6, Preempted: b.key}), wire.StatusSuccess)
	if s, regs := a.report(); s.Type != 6 || len(regs) != 2 || !regs[1].Holder || !regs[3].Holder {
		t.Errorf("after one was preempted: %+v %v", s, regs)
	}
	expect("preempt all", a.acquire(wire.ReservationAcquire{Action: wire.Preempt, Type: 5}), wire.StatusSuccess)
	if s, regs := a.report(); s.Type != 5 || len(regs) != 1 {
		t.Errorf("after all were preempted: %+v %v", s, regs)
	}
	expect("unregister the last", a.register(wire.ReservationRegister{Action: wire.UnregisterKey, IgnoreKey: true}), wire.StatusSuccess)
	if s, _ := a.report(); s.Type != 0 {
		t.Errorf("after the last has gone: %+v", s)
	}
	expect("report of 64-bit host IDs", a.status(wire.ReservationReport{NSID: 1, Length: 4096}.Command(), nil, nil), wire.StatusHostID)

	// A key is the host's, whichever controller it comes by.
	a.join()
	h := newHost(t, tgt.Addr(2), hostOptions{hostID: 1, nqn: hostNQN + "1"})
	again := &reserver{h.queue(1, 8), a.key}
	expect("acquire by another controller", again.acquire(wire.ReservationAcquire{Type: 2}), wire.StatusSuccess)
	if reads, writes := a.may(); !reads || !writes {
		t.Error("another controller of the holder's host may not")
	}
}

// TestHostIDTaken: a host with another one's identifier, which reservations go by, does not get in while that one is there.
func TestHostIDTaken(t *testing.T) {
	tgt := startTarget(t, testConfig(t, ramDir(t)))
	first := newHost(t, tgt.Addr(1), hostOptions{hostID: 1, nqn: hostNQN + "1"})
	try := func(o hostOptions) (wire.Completion, *hostQueue) {
		q := dial(t, tgt.Addr(2), wire.ICReq{})
		return o.connect(q, wire.Connect{QueueSize: 32}, wire.CntlIDAny), q
	}
	for _, o := range []hostOptions{{hostID: 1, nqn: hostNQN + "1"}, {hostID: 2, nqn: hostNQN + "2"}, {hostID: 1, nqn: hostNQN + "2", subsys: wire.DiscoveryNQN}} {
		comp, q := try(o)
		if comp.Status != wire.StatusSuccess {
			t.Errorf("%+v: %v", o, comp.Status.Text(wire.SetFabrics))
		}
		q.nc.Close()
	}
	other := hostOptions{hostID: 1, nqn: hostNQN + "2"}
	if comp, _ := try(other); comp.Status != wire.StatusConnectHost || !comp.DNR {
		t.Errorf("the identifier of another host: %v, DNR %v", comp.Status.Text(wire.SetFabrics), comp.DNR)
	}
	first.admin.nc.Close()
	waittest.Until(t, "the other host gets in when the first has left", func() bool {
		comp, _ := try(other)
		return comp.Status == wire.StatusSuccess
	})
}

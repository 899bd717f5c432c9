package meta

import (
	"slices"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// TestPrograms checks who may change a program while another session executes it, and which programs that concerns.
func TestPrograms(t *testing.T) {
	const busy = metarpc.Status(syscall.ETXTBSY)
	h := startMemory(t)
	a, b := h.root(), h.root()
	open := func(c *client, id layout.FileID, access metarpc.Access) error {
		_, err := ask[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: access})
		return err
	}
	set := func(c *client, args metarpc.SetAttrArgs) error {
		_, err := ask[metarpc.AttrResult](c, metarpc.OpSetAttr, &args)
		return err
	}
	program := a.create(layout.RootID, "program")
	a.chmod(program, 0o4755)
	changes := func(c *client, want metarpc.Status) {
		t.Helper()
		wantStatus(t, open(c, program, metarpc.AccessWrite), want)
		wantStatus(t, set(c, metarpc.SetAttrArgs{ID: program, Mask: metarpc.SetSize, Size: 3}), want)
		a.chmod(program, 0o4755)
		wantStatus(t, set(c, metarpc.SetAttrArgs{ID: program, Mask: metarpc.ClearPrivileges}), want)
		a.chmod(program, 0o4755)
	}
	wantStatus(t, open(a, program, metarpc.AccessExec), 0)
	changes(b, busy)
	changes(a, 0) // its own kernel sees to that
	// The owner is changed at any time, and the mode.
	wantStatus(t, set(b, metarpc.SetAttrArgs{ID: program, Mask: metarpc.SetUID | metarpc.ClearPrivileges, UID: 5}), 0)
	a.chmod(program, 0o755)
	wantStatus(t, open(b, program, metarpc.AccessWrite), busy) // a may not have seen that it lost its privileges
	wantStatus(t, open(b, program, metarpc.AccessRead), 0)
	// Restarts change nothing for those who come back.
	a.chmod(program, 0o4755)
	a.closeFile(program)
	wantStatus(t, open(a, program, metarpc.AccessExec), 0)
	h.restart()
	for _, c := range []*client{a, b} {
		c.connect()
	}
	must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: program, Access: metarpc.AccessExec, Reclaim: true})
	for _, c := range []*client{a, b} {
		must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
	}
	changes(b, busy)
	a.closeFile(program)
	changes(b, 0)

	// One without privileges is not looked after, and one that loses them while somebody asks for it is refused.
	plain := a.create(layout.RootID, "plain")
	a.chmod(plain, 0o755)
	wantStatus(t, open(a, plain, metarpc.AccessExec), 0)
	wantStatus(t, open(b, plain, metarpc.AccessWrite), 0)
	a.chmod(program, 0o4755)
	a.attrLease(program)
	told, let := a.listen(true)
	disarmed := make(chan error)
	go func() { disarmed <- set(b, metarpc.SetAttrArgs{ID: program, Mask: metarpc.ClearPrivileges}) }()
	<-told.came
	wantStatus(t, open(a, program, metarpc.AccessExec), busy)
	let()
	wantStatus(t, <-disarmed, 0)
	wantStatus(t, open(a, program, metarpc.AccessExec), 0)
}

// TestArmedTells has a file get privileges: sessions that have it open for writing hear of it, with leases or without,
// once it has them.
func TestArmedTells(t *testing.T) {
	h := startMemory(t)
	a, writer, reader := h.root(), h.root(), h.root()
	id := a.create(layout.RootID, "f")
	for c, access := range map[*client]metarpc.Access{writer: metarpc.AccessWrite, reader: metarpc.AccessRead} {
		must[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: access})
		must[metarpc.Empty](c, metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: []layout.FileID{id}})
	}
	toWriter, _ := writer.listen(false)
	toReader, _ := reader.listen(false)
	calls := func(r *told) int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.calls
	}
	for n, c := range []struct {
		change func()
		tells  bool
	}{
		{func() { a.chmod(id, 0o600) }, false},
		{func() { a.chmod(id, 0o4700) }, true},
		{func() { a.chmod(id, 0o4711) }, false},
		{func() { a.chmod(id, 0o6711) }, true},
		{func() { a.chmod(id, 0o600) }, false},
		{func() {
			must[metarpc.Empty](a, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: "security.capability", Value: []byte("cap")})
		}, true},
	} {
		before := calls(toWriter)
		c.change()
		if got := calls(toWriter) - before; (got > 0) != c.tells {
			t.Errorf("change %d: told %d times, want %v", n, got, c.tells)
		}
	}
	if got := calls(toReader); got != 0 {
		t.Errorf("a reader was told %d times", got)
	}
	if got := toWriter.recalled()[id]; got != attrs || slices.Contains(toWriter.sizes, id) {
		t.Errorf("told of %d and asked for %v, want attributes", got, toWriter.sizes)
	}
}

func (c *client) chmod(id layout.FileID, mode uint32) {
	c.t.Helper()
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Mode: mode})
}

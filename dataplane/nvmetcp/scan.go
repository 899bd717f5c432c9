package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// ID is what a namespace is known by, on whatever controller, subsystem or number it appears. Those that are zero are not known; one
// of the first three is.
type ID struct {
	UUID  [16]byte
	NGUID [16]byte
	EUI64 [8]byte
	CSI   uint8 // command set
}

func (id ID) String() string {
	switch {
	case id.UUID != [16]byte{}:
		u := id.UUID
		return fmt.Sprintf("uuid %x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
	case id.NGUID != [16]byte{}:
		return fmt.Sprintf("nguid %x", id.NGUID)
	}
	return fmt.Sprintf("eui64 %x", id.EUI64)
}

// known reports whether there is an identifier at all.
func (id ID) known() bool {
	id.CSI = 0
	return id != ID{}
}

// same reports whether an identifier of both is equal, as those of two namespaces never are.
func (id ID) same(other ID) bool {
	return id.UUID != [16]byte{} && id.UUID == other.UUID || id.NGUID != [16]byte{} && id.NGUID == other.NGUID ||
		id.EUI64 != [8]byte{} && id.EUI64 == other.EUI64
}

// Format is how the blocks of a namespace are to be used. All paths to it agree on that.
type Format struct {
	BlockSize   int    // bytes
	MaxTransfer int    // most bytes of data of one command
	MaxBlocks   int    // most blocks of one command
	Boundary    uint32 // no command may cross a multiple of so many blocks; 0: none
	Cached      bool   // writes are not stable before a Flush, or with FUA
	Zeros       bool   // what was deallocated reads as zeros
	Reservable  bool   // the controller takes reservations
	Deallocates bool   // the controller can be told what is not needed any more
}

// accepts tells why a path with format f cannot be used for a namespace of this one, which callers rely on.
func (have Format) accepts(f Format) error {
	switch {
	case f.BlockSize != have.BlockSize:
		return fmt.Errorf("has blocks of %d bytes instead of %d", f.BlockSize, have.BlockSize)
	case f.MaxTransfer < have.MaxTransfer:
		return fmt.Errorf("takes %d bytes in one command, fewer than the %d of the others", f.MaxTransfer, have.MaxTransfer)
	case f.MaxBlocks < have.MaxBlocks:
		return fmt.Errorf("takes %d blocks in one command, fewer than the %d of the others", f.MaxBlocks, have.MaxBlocks)
	case f.Boundary != have.Boundary:
		return fmt.Errorf("has a boundary every %d blocks instead of %d", f.Boundary, have.Boundary)
	case f.Cached && !have.Cached:
		return errors.New("has a volatile cache, which the others have not")
	case f.Zeros != have.Zeros:
		return errors.New("differs in what deallocated blocks read as")
	case f.Reservable != have.Reservable:
		return errors.New("differs in whether it takes reservations")
	}
	return nil
}

// found is what a scan has seen of a namespace on one controller.
type found struct {
	nsid   uint32
	id     ID
	blocks uint64
	format Format
	group  uint32 // ANA group, 0: none
	fixed  bool   // write protected
}

// scan looks at all active namespaces of a controller. Those that cannot be used are told with the reason.
func scan(ctx context.Context, c controller, where string) (list []found, refused map[uint32]error, err error) {
	nsids, err := c.ActiveNamespaces(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("list of namespaces: %w", err)
	}
	refused = map[uint32]error{}
	for _, nsid := range nsids {
		f, exists, bad, err := inspect(ctx, c, nsid)
		switch {
		case err != nil:
			return nil, nil, fmt.Errorf("namespace %d: %w", nsid, err)
		case bad != nil:
			refused[nsid] = fmt.Errorf("nvmetcp: %s: namespace %d %w", where, nsid, bad)
		case exists:
			list = append(list, f)
		}
	}
	return list, refused, nil
}

// inspect looks at one namespace. bad is why it cannot be used.
func inspect(ctx context.Context, c controller, nsid uint32) (f found, exists bool, bad, err error) {
	ns, err := c.IdentifyNamespace(ctx, nsid)
	switch _, answered := errors.AsType[*StatusError](err); {
	case errors.Is(err, wire.StatusInvalidNamespace), err == nil && *ns == wire.Namespace{}:
		return f, false, nil, nil // it went away
	case err == nil && !ns.Exists():
		return f, true, errors.New("has no blocks: give it a size at the target"), nil
	case answered || errors.Is(err, wire.ErrInvalid):
		return f, true, fmt.Errorf("cannot be used: %w", err), nil
	case err != nil:
		return f, false, nil, err
	}
	f.id.NGUID, f.id.EUI64 = ns.NGUID, ns.EUI64
	ids, err := c.NamespaceDescriptors(ctx, nsid)
	switch _, answered := errors.AsType[*StatusError](err); {
	case errors.Is(err, wire.StatusInvalidField), errors.Is(err, wire.StatusInvalidOpcode): // a controller of before version 1.3
	case errors.Is(err, wire.StatusInvalidNamespace):
		return f, false, nil, nil // it went away
	case answered || errors.Is(err, wire.ErrInvalid):
		return f, true, fmt.Errorf("cannot be used: %w", err), nil
	case err != nil:
		return f, false, nil, err
	default:
		f.id.UUID, f.id.CSI = ids.UUID, ids.CSI
		if ids.NGUID != [16]byte{} {
			f.id.NGUID = ids.NGUID
		}
		if ids.EUI64 != [8]byte{} {
			f.id.EUI64 = ids.EUI64
		}
	}
	info, limits := c.Info(), c.Limits()
	f.nsid, f.blocks, f.group = nsid, ns.NSZE, ns.ANAGRPID
	f.fixed = ns.NSATTR&wire.NSATTRWriteProtected != 0
	f.format = Format{
		BlockSize:   ns.BlockSize(),
		MaxTransfer: limits.MaxTransfer,
		MaxBlocks:   limits.MaxBlocks,
		Boundary:    uint32(ns.NOIOB),
		Cached:      info.Controller.VWC&wire.VWCPresent != 0,
		Zeros:       ns.DLFEAT&wire.DLFEATReadMask == wire.DLFEATZeros,
		Reservable:  info.Controller.ONCS&wire.ONCSReservations != 0 && ns.RESCAP != 0,
		Deallocates: info.Controller.ONCS&wire.ONCSDSM != 0,
	}
	switch {
	case f.id.CSI != wire.CSINVM:
		bad = fmt.Errorf("has command set %d, want %d: zoned and key-value namespaces are not used", f.id.CSI, wire.CSINVM)
	case ns.Metadata != 0:
		bad = fmt.Errorf("is formatted with %d bytes of metadata for each block: format it without", ns.Metadata)
	case !f.id.known():
		bad = errors.New("has no UUID, NGUID or EUI64, so that it could be mistaken for another: give it one at the target")
	}
	return f, true, bad, nil
}

// passing reports whether err, why a namespace cannot be used, is a status that may be another one soon.
func passing(err error) bool {
	answer, ok := errors.AsType[*StatusError](err)
	if !ok {
		return false
	}
	switch answer.Class() {
	case wire.ClassRetry, wire.ClassPath, wire.ClassANA:
		return true
	}
	return false
}

// IDs notes which namespace of which subsystem has an identifier, so that the same data is not used twice. The zero value is ready.
type IDs struct {
	mu    sync.Mutex
	owner map[ID]claim
}

type claim struct {
	nqn  string
	nsid uint32
}

// claim notes that the namespace has the identifier, unless that is another one's.
func (t *IDs) claim(id ID, nqn string, nsid uint32) error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	me := claim{nqn, nsid}
	for other, who := range t.owner {
		if who != me && other.same(id) {
			return fmt.Errorf("namespace %d and namespace %d of %s both are %v: not used, give each an identifier of its own", nsid, who.nsid, who.nqn, id)
		}
	}
	if t.owner == nil {
		t.owner = map[ID]claim{}
	}
	t.owner[id] = me
	return nil
}

func (t *IDs) release(id ID, nqn string, nsid uint32) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.owner[id] == (claim{nqn, nsid}) {
		delete(t.owner, id)
	}
}

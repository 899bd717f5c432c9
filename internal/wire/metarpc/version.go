package metarpc

import "fmt"

// Version is the highest version of the protocol that is spoken here, Lowest the lowest. The package comment says how they change.
const (
	Lowest  = 3
	Version = 10
)

const (
	// topVersion is the first version with Welcome.Top.
	topVersion = 8
	// TurnsBack is the first version with StatusStuck and StatusTurnedBack.
	TurnsBack = 10
)

// Versions is a range of versions of a protocol.
type Versions struct{ Lowest, Highest uint32 }

// Spoken are the versions that are spoken here.
var Spoken = Versions{Lowest, Version}

// Or returns v, or other if v is zero.
func (v Versions) Or(other Versions) Versions {
	if v == (Versions{}) {
		return other
	}
	return v
}

// Has reports whether a version is in the range.
func (v Versions) Has(version uint32) bool { return v.Lowest <= version && version <= v.Highest }

// Choose returns the version that two sides speak with each other: the highest that both know. There may be none.
func (v Versions) Choose(other Versions) (version uint32, ok bool) {
	version = min(v.Highest, other.Highest)
	return version, v.Has(version) && other.Has(version)
}

func (v Versions) String() string {
	if v.Lowest == v.Highest {
		return fmt.Sprintf("version %d", v.Lowest)
	}
	return fmt.Sprintf("versions %d to %d", v.Lowest, v.Highest)
}

// Mismatch says for people why a client and a service that speak no version in common do not work with each other, and what to do about it.
func Mismatch(client, service Versions) string {
	old := "weftd on the service's host"
	if client.Highest < service.Lowest {
		old = "weft on the client"
	}
	return fmt.Sprintf("the client speaks %v of the metadata protocol, the service %v: upgrade %s", client, service, old)
}

// newOps and newBackOps are the calls and callbacks that Lowest does not have, with the versions they came with.
var (
	newOps     = map[Op]uint32{OpClientSet: 5, OpClientList: 5, OpVerify: 6, OpReportDevices: 7, OpParent: 9}
	newBackOps = map[BackOp]uint32{BackReserveRecall: 6, BackDeviceStates: 7}
)

// In reports whether a version has the call.
func (o Op) In(version uint32) bool { return o.Valid() && newOps[o] <= version }

// In reports whether a version has the callback.
func (o BackOp) In(version uint32) bool { return o.Valid() && newBackOps[o] <= version }

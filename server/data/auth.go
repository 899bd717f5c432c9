package data

import (
	"math"
	"slices"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// Permissions that authorize checks, as in access(2).
const (
	mayRead  = 4
	mayWrite = 2
	mayExec  = 1
)

// authorize tells whether cred has all the rights in want on what st describes. It and authorizeChange are the only
// places that decide.
//
// The owner of a data file is a user and a group, neither of which is worth anything by itself to one who wants to
// write. Further groups of a call count for directories only: with them one call could try many.
func authorize(cred *oncrpc.AuthSys, st *unix.Stat_t, want uint32) bool {
	if cred.UID == 0 {
		return true
	}
	mode := st.Mode
	owner, group := cred.UID == st.Uid, inGroup(cred, st.Gid)
	if mode&unix.S_IFMT == unix.S_IFREG {
		group = cred.GID == st.Gid
		owner = owner && group
	}
	switch {
	case owner:
		mode >>= 6
	case group:
		mode >>= 3
	}
	return mode&want == want
}

// nobody is the user that root of a guest is.
const nobody = 65534

func inGroup(cred *oncrpc.AuthSys, gid uint32) bool {
	return cred.GID == gid || slices.Contains(cred.GIDs, gid)
}

// authorizeChange checks the attributes that cred wants to give to what st describes: EINVAL, EFBIG or EISDIR if they
// make no sense, EACCES or EPERM if cred may not. As in Linux, only uid 0 gives a file away or to a group it is not in.
func authorizeChange(cred *oncrpc.AuthSys, st *unix.Stat_t, a *wire.Sattr) error {
	if err := checkAttr(a, st.Mode&unix.S_IFMT == unix.S_IFDIR); err != nil || cred.UID == 0 {
		return err
	}
	owner := cred.UID == st.Uid
	writer := authorize(cred, st, mayWrite)
	if a.SetSize && !writer {
		return unix.EACCES
	}
	uid := !a.SetUID || a.UID == st.Uid
	gid := !a.SetGID || a.GID == st.Gid || owner && inGroup(cred, a.GID)
	times := owner || a.AtimeHow != wire.ClientTime && a.MtimeHow != wire.ClientTime
	if !uid || !gid || !times || a.SetMode && !owner {
		return unix.EPERM
	}
	if (a.AtimeHow == wire.ServerTime || a.MtimeHow == wire.ServerTime) && !owner && !writer {
		return unix.EACCES
	}
	return nil
}

// checkAttr refuses attributes that system calls would refuse or, worse, take for something else.
func checkAttr(a *wire.Sattr, dir bool) error {
	const (
		keepID  = math.MaxUint32 // chown(2): leave it
		maxNsec = 999_999_999    // utimensat(2): now, leave it
	)
	switch {
	case a.SetUID && a.UID == keepID, a.SetGID && a.GID == keepID,
		a.AtimeHow == wire.ClientTime && a.Atime.Nsec > maxNsec,
		a.MtimeHow == wire.ClientTime && a.Mtime.Nsec > maxNsec:
		return unix.EINVAL
	case a.SetSize && dir:
		return unix.EISDIR
	case a.SetSize && a.Size > math.MaxInt64:
		return unix.EFBIG
	}
	return nil
}

package admit

import (
	"os/user"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Caller is the user that a credential stands for. groupsOf tells the groups of a user whose client could not.
func (e Export) Caller(cred metarpc.Cred, groupsOf func(uid uint32) []uint32) *perm.Caller {
	who := &perm.Caller{UID: cred.UID, GID: cred.GID, Groups: cred.Groups, ReadOnly: e.ReadOnly}
	switch {
	case e.AllSquash:
		who.UID, who.GID, who.Groups = e.AnonUID, e.AnonGID, nil
	case cred.ByUID:
		who.Groups = groupsOf(cred.UID)
	}
	if e.RootSquash {
		if who.UID == 0 {
			who.UID = e.AnonUID
		}
		if who.GID == 0 {
			who.GID = e.AnonGID
		}
		if slices.Contains(who.Groups, 0) {
			who.Groups = slices.Clone(who.Groups)
			for i, gid := range who.Groups {
				if gid == 0 {
					who.Groups[i] = e.AnonGID
				}
			}
		}
	}
	if !has(e.UIDs, who.UID) {
		who.UID, who.GID, who.Groups = e.AnonUID, e.AnonGID, nil
	}
	if e.GIDs != nil {
		if !has(e.GIDs, who.GID) {
			who.GID = e.AnonGID
		}
		who.Groups = slices.DeleteFunc(slices.Clone(who.Groups), func(gid uint32) bool { return !has(e.GIDs, gid) })
	}
	who.Privileged = who.UID == 0
	return who
}

// Of users whose client cannot see their groups this many are remembered, each for a minute, as exportd does.
const (
	groupsKept     = 4096
	groupsValidity = time.Minute
)

// Groups knows the supplementary groups of users as this machine has them.
type Groups struct {
	lookUp func(uid uint32) []uint32

	mu    sync.Mutex
	users map[uint32]userGroups
}

type userGroups struct {
	groups []uint32
	until  time.Time
}

func NewGroups() *Groups {
	return &Groups{lookUp: groupsOfUser, users: map[uint32]userGroups{}}
}

// Of returns the groups of a user; nobody changes them.
func (g *Groups) Of(uid uint32) []uint32 {
	now := time.Now()
	g.mu.Lock()
	u, ok := g.users[uid]
	g.mu.Unlock()
	if ok && now.Before(u.until) {
		return u.groups
	}
	u = userGroups{g.lookUp(uid), now.Add(groupsValidity)}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.users) >= groupsKept {
		clear(g.users)
	}
	g.users[uid] = u
	return u.groups
}

// groupsOfUser reads the groups of a user, none if there is no such user here.
func groupsOfUser(uid uint32) []uint32 {
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return nil
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil
	}
	var groups []uint32
	for _, id := range ids {
		if gid, err := strconv.ParseUint(id, 10, 32); err == nil {
			groups = append(groups, uint32(gid))
		}
	}
	return groups
}

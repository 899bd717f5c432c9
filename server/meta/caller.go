package meta

import (
	"os/user"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// caller is on whose behalf a call is executed, after what the client's export makes of the credential.
type caller struct {
	uid, gid   uint32
	groups     []uint32 // supplementary
	privileged bool     // is root: may do what Linux lets CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_CHOWN and CAP_FSETID do
	readOnly   bool
}

// UID and In make caller an acl.Who.
func (w *caller) UID() uint32 { return w.uid }

func (w *caller) In(gid uint32) bool { return w.gid == gid || slices.Contains(w.groups, gid) }

// caller finds out on whose behalf c is executed.
func (s *Service) caller(c *call) *caller {
	if c.who == nil {
		c.sess.mu.Lock()
		e := c.sess.grant.Export
		c.sess.mu.Unlock()
		c.who = e.caller(c.h.Cred, s.groups.of)
	}
	return c.who
}

// caller is who a credential stands for. groupsOf tells the groups of a user whose client could not.
func (e Export) caller(cred metarpc.Cred, groupsOf func(uid uint32) []uint32) *caller {
	who := &caller{uid: cred.UID, gid: cred.GID, groups: cred.Groups, readOnly: e.ReadOnly}
	switch {
	case e.AllSquash:
		who.uid, who.gid, who.groups = e.AnonUID, e.AnonGID, nil
	case cred.ByUID:
		who.groups = groupsOf(cred.UID)
	}
	if e.RootSquash {
		if who.uid == 0 {
			who.uid = e.AnonUID
		}
		if who.gid == 0 {
			who.gid = e.AnonGID
		}
		if slices.Contains(who.groups, 0) {
			who.groups = slices.Clone(who.groups)
			for i, gid := range who.groups {
				if gid == 0 {
					who.groups[i] = e.AnonGID
				}
			}
		}
	}
	if !has(e.UIDs, who.uid) {
		who.uid, who.gid, who.groups = e.AnonUID, e.AnonGID, nil
	}
	if e.GIDs != nil {
		if !has(e.GIDs, who.gid) {
			who.gid = e.AnonGID
		}
		who.groups = slices.DeleteFunc(slices.Clone(who.groups), func(gid uint32) bool { return !has(e.GIDs, gid) })
	}
	who.privileged = who.uid == 0
	return who
}

// Of users whose client cannot see their groups this many are remembered, each for a minute, as exportd does.
const (
	groupsKept     = 4096
	groupsValidity = time.Minute
)

// groupCache knows the supplementary groups of users as this machine has them.
type groupCache struct {
	lookUp func(uid uint32) []uint32

	mu    sync.Mutex
	users map[uint32]userGroups
}

type userGroups struct {
	groups []uint32
	until  time.Time
}

func newGroupCache() *groupCache {
	return &groupCache{lookUp: groupsOfUser, users: map[uint32]userGroups{}}
}

// of returns the groups of a user; nobody changes them.
func (g *groupCache) of(uid uint32) []uint32 {
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

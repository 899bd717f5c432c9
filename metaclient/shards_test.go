package metaclient

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// cluster is a volume of several shards. Each has a service, which is at one of the addresses, or at none. Who connects to another
// address is told where it is.
type cluster struct {
	t     testing.TB
	parts []*service
	tasks sync.WaitGroup

	mu       sync.Mutex
	ring     metarpc.Ring   // what is so
	told     *metarpc.Ring  // what hellos are told; nil = that
	dead     map[string]int // addresses that refuse connections (refuses) or do not answer (silent)
	tries    []string       // addresses that were connected to
	nodes    map[layout.FileID]*node
	sessions map[int]int // that were begun, by shard
	// lookups are names of directories of a shard that are asked for; replies that are not made yet wait for hold.
	hold   map[int]chan struct{}
	frozen map[int]int // services that answer nothing on their connections, which are so many; see freeze
}

const (
	refuses = iota + 1
	silent
)

// node is an inode of a cluster.
type node struct {
	attr  metarpc.Attr
	names map[string]layout.FileID
}

// in is the nth inode of a shard of three.
func in(shard, n int) layout.FileID {
	return layout.FileID((3+shard)*layout.ShardChunk + n)
}

// newCluster is a volume of three shards at the addresses a:1 to c:1. In its root there are the directories d0 to d2, each of the shard of its number,
// with names of files of all shards: f0 to f2, of which d0/f1 is inode in(1, 10).
func newCluster(t testing.TB) *cluster {
	cl := &cluster{
		t: t, dead: map[string]int{}, nodes: map[layout.FileID]*node{}, sessions: map[int]int{}, hold: map[int]chan struct{}{}, frozen: map[int]int{},
		ring: metarpc.Ring{Epoch: 1, Services: []string{"a:1", "b:1", "c:1"}, Owners: []int{0, 1, 2}},
	}
	add := func(id layout.FileID, mode uint32) *node {
		n := &node{attr: metarpc.Attr{ID: id, Mode: mode, Nlink: 1, Size: int64(id)}}
		if mode&syscall.S_IFMT == syscall.S_IFDIR {
			n.names = map[string]layout.FileID{}
		}
		cl.nodes[id] = n
		return n
	}
	root := add(layout.RootID, syscall.S_IFDIR|0o755)
	for shard := range 3 {
		d := add(in(shard, 1), syscall.S_IFDIR|0o755)
		root.names[fmt.Sprint("d", shard)] = d.attr.ID
		for of := range 3 {
			f := add(in(of, 10+shard), syscall.S_IFREG|0o644)
			d.names[fmt.Sprint("f", of)] = f.attr.ID
		}
		s := newService(t.(*testing.T))
		s.instance = [16]byte{byte(shard), 1}
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) { return cl.handle(shard, op, args) }
		s.cut = func(string, metarpc.Op) bool {
			cl.thawed(shard)
			return false
		}
		s.welcome = func(nc net.Conn, w *metarpc.Welcome) bool {
			cl.mu.Lock()
			defer cl.mu.Unlock()
			w.Ring = cl.tell()
			return true
		}
		cl.parts = append(cl.parts, s)
	}
	t.Cleanup(cl.stop)
	return cl
}

func (cl *cluster) stop() {
	for _, s := range cl.parts {
		s.stop()
	}
	cl.tasks.Wait()
}

// tell is the ring that hellos are told; cl.mu is held.
func (cl *cluster) tell() metarpc.Ring {
	r := cl.ring
	if cl.told != nil {
		r = *cl.told
	}
	r.Owners = slices.Clone(r.Owners)
	return r
}

func (cl *cluster) dial(ctx context.Context, addr string) (net.Conn, error) {
	cl.mu.Lock()
	cl.tries = append(cl.tries, addr)
	how := cl.dead[addr]
	if !slices.Contains(cl.ring.Services, addr) {
		how = refuses
	}
	cl.mu.Unlock()
	switch how {
	case refuses:
		return nil, syscall.ECONNREFUSED
	case silent:
		<-ctx.Done()
		return nil, ctx.Err()
	}
	client, server := net.Pipe()
	cl.tasks.Go(func() {
		r := bufio.NewReader(server)
		frame, err := metarpc.ReadFrame(r, nil, metarpc.MaxHello)
		if err != nil {
			server.Close()
			return
		}
		hello, err := metarpc.ParseHello(frame, metarpc.Spoken)
		if err != nil {
			cl.t.Error(err)
			return
		}
		cl.mu.Lock()
		owner := cl.ring.Owners[hello.Shard]
		here := owner >= 0 && cl.ring.Services[owner] == addr
		w := &metarpc.Welcome{Magic: metarpc.Magic, Version: metarpc.Version, Status: metarpc.StatusMoved, Message: "elsewhere", Volume: cl.parts[0].volume, Ring: cl.tell()}
		if here && hello.Session == (metarpc.SessionID{}) {
			cl.sessions[hello.Shard]++
		}
		cl.mu.Unlock()
		if here {
			s := cl.parts[hello.Shard]
			s.run(server, func() error { return s.serve(server, r, hello) })
			return
		}
		b, err := metarpc.AppendWelcome(nil, w)
		if err != nil {
			cl.t.Error(err)
		}
		server.Write(b)
		server.Close()
	})
	return client, nil
}

// move gives a shard to the service at an index of the ring, -1 for none, where it is another instance.
func (cl *cluster) move(shard, owner int) {
	cl.mu.Lock()
	cl.ring.Epoch++
	cl.ring.Owners = slices.Clone(cl.ring.Owners)
	cl.ring.Owners[shard] = owner
	cl.mu.Unlock()
	s := cl.parts[shard]
	s.mu.Lock()
	s.instance[1]++
	s.mu.Unlock()
	s.hangUp()
}

// connect starts a client and closes it, and what serves it, at the end of the test.
func (cl *cluster) connect(cfg Config) *Volume {
	cl.t.Helper()
	if cfg.Addrs == nil {
		cfg.Addrs = []string{"a:1"}
	}
	cfg.Log = quiet()
	v, err := start(context.Background(), cfg, cl.dial)
	if err != nil {
		cl.t.Fatal(err)
	}
	cl.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		v.Close(ctx)
		cl.stop()
	})
	return v
}

// executed takes the calls that each shard has executed since it was last asked, but those that a client makes by itself.
func (cl *cluster) executed() string {
	var all []string
	for shard, s := range cl.parts {
		s.mu.Lock()
		for _, op := range s.calls {
			switch op {
			case metarpc.OpRenew, metarpc.OpReclaimComplete, metarpc.OpClose, metarpc.OpLeaseReturn:
			default:
				all = append(all, fmt.Sprint(op, "@", shard))
			}
		}
		s.calls = nil
		s.mu.Unlock()
	}
	return strings.Join(all, " ")
}

// concerns is what the protocol says that a call is made by: the inode or directory in the session of whose shard it belongs.
func concerns(args any) (ids []layout.FileID) {
	switch a := args.(type) {
	case *metarpc.IDArgs:
		return []layout.FileID{a.ID}
	case *metarpc.OpenArgs:
		return []layout.FileID{a.ID}
	case *metarpc.NameArgs:
		return []layout.FileID{a.Parent}
	case *metarpc.CreateArgs:
		return []layout.FileID{a.Parent}
	case *metarpc.MakeNodeArgs:
		return []layout.FileID{a.Parent}
	case *metarpc.TmpFileArgs:
		return []layout.FileID{a.Parent}
	case *metarpc.RemoveArgs:
		return []layout.FileID{a.Parent}
	case *metarpc.RenameArgs:
		return []layout.FileID{a.OldParent}
	case *metarpc.LinkArgs:
		return []layout.FileID{a.ID}
	case *metarpc.SetAttrArgs:
		return []layout.FileID{a.ID}
	case *metarpc.ReadDirArgs:
		return []layout.FileID{a.ID}
	case *metarpc.XattrArgs:
		return []layout.FileID{a.ID}
	case *metarpc.LayoutGetArgs:
		return []layout.FileID{a.ID}
	case *metarpc.ReserveArgs:
		return []layout.FileID{a.ID}
	case *metarpc.LockArgs:
		return []layout.FileID{a.ID}
	case *metarpc.LayoutErrorArgs:
		return []layout.FileID{a.ID}
	case *metarpc.LayoutMoveArgs:
		return []layout.FileID{a.ID}
	case *metarpc.CacheStartArgs:
		return []layout.FileID{a.ID}
	case *metarpc.CacheDoneArgs:
		return []layout.FileID{a.ID}
	case *metarpc.CacheDropArgs:
		return []layout.FileID{a.ID}
	case *metarpc.CloseArgs:
		return a.IDs
	case *metarpc.LayoutReturnArgs:
		return a.IDs
	case *metarpc.LeaseReturnArgs:
		return a.IDs
	case *metarpc.LayoutCommitArgs:
		for _, r := range a.Reports {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

// handle executes a call at a shard.
func (cl *cluster) handle(shard int, op metarpc.Op, args any) (metarpc.Status, any) {
	cl.mu.Lock()
	hold := cl.hold[shard]
	cl.mu.Unlock()
	if hold != nil && op != metarpc.OpRenew && op != metarpc.OpEndSession {
		select {
		case <-hold:
		case <-cl.parts[shard].ctx.Done():
		}
	}
	for _, id := range concerns(args) {
		if layout.ShardOf(id, 3) != shard {
			cl.t.Errorf("%v of inode %d, which is of shard %d, was asked of shard %d", op, id, layout.ShardOf(id, 3), shard)
			return metarpc.StatusBadArgs, nil
		}
	}
	cl.mu.Lock()
	defer cl.mu.Unlock()
	// as is what this shard tells of an inode, and the lease on it.
	as := func(n *node) (metarpc.Attr, metarpc.Lease) {
		switch {
		case layout.ShardOf(n.attr.ID, 3) == shard:
			return n.attr, metarpc.LeaseAttrs
		case n.names != nil:
			return n.attr, 0
		}
		return metarpc.Attr{ID: n.attr.ID, Mode: n.attr.Mode & syscall.S_IFMT}, 0
	}
	child := func(dir layout.FileID, name string) *node { return cl.nodes[cl.nodes[dir].names[name]] }
	switch a := args.(type) {
	case *metarpc.NameArgs:
		r := &metarpc.LookupResult{Names: metarpc.LeaseNames}
		if id := cl.nodes[a.Parent].names[a.Name]; cl.nodes[id] != nil {
			r.Attr, r.Lease = as(cl.nodes[id])
		} else if id != 0 { // a name of what is gone: it has just been removed
			r.Attr = metarpc.Attr{ID: id, Mode: syscall.S_IFREG}
			delete(cl.nodes[a.Parent].names, a.Name)
			r.Names = 0
		}
		return metarpc.StatusOK, r
	case *metarpc.IDArgs:
		n := cl.nodes[a.ID]
		switch {
		case n == nil:
			return metarpc.Status(syscall.ESTALE), nil
		case op == metarpc.OpGetAttr:
			attr, lease := as(n)
			return metarpc.StatusOK, &metarpc.AttrResult{Attr: attr, Lease: lease}
		}
	case *metarpc.OpenArgs:
		n := cl.nodes[a.ID]
		switch {
		case n == nil:
			return metarpc.Status(syscall.ESTALE), nil
		case n.attr.Mode&0o777 == 0:
			return metarpc.Status(syscall.EACCES), nil
		}
		attr, lease := as(n)
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: attr, Lease: lease}
	case *metarpc.CreateArgs:
		if id := cl.nodes[a.Parent].names[a.Name]; id != 0 {
			r := &metarpc.CreateResult{Attr: metarpc.Attr{ID: id, Mode: syscall.S_IFREG}}
			if n := child(a.Parent, a.Name); n != nil {
				r.Attr, r.Lease = as(n)
			} else {
				delete(cl.nodes[a.Parent].names, a.Name)
			}
			return metarpc.StatusOK, r
		}
		n := &node{attr: metarpc.Attr{ID: in(shard, 100+len(cl.nodes)), Mode: syscall.S_IFREG | a.Mode, Nlink: 1}}
		cl.nodes[n.attr.ID] = n
		cl.nodes[a.Parent].names[a.Name] = n.attr.ID
		return metarpc.StatusOK, &metarpc.CreateResult{Attr: n.attr, Created: true, Lease: metarpc.LeaseAttrs}
	case *metarpc.MakeNodeArgs:
		if child(a.Parent, a.Name) != nil {
			return metarpc.Status(syscall.EEXIST), nil
		}
		n := &node{attr: metarpc.Attr{ID: in(shard, 100+len(cl.nodes)), Mode: a.Mode, Nlink: 1}}
		if a.Mode&syscall.S_IFMT == syscall.S_IFDIR { // elsewhere
			n.attr.ID, n.names = in((shard+1)%3, 100+len(cl.nodes)), map[string]layout.FileID{}
		}
		cl.nodes[n.attr.ID] = n
		cl.nodes[a.Parent].names[a.Name] = n.attr.ID
		attr, lease := as(n)
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: attr, Lease: lease}
	case *metarpc.SetAttrArgs:
		attr, lease := as(cl.nodes[a.ID])
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: attr, Lease: lease}
	case *metarpc.LinkArgs:
		attr, lease := as(cl.nodes[a.ID])
		cl.nodes[a.Parent].names[a.Name] = a.ID
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: attr, Lease: lease}
	case *metarpc.RemoveArgs:
		delete(cl.nodes, cl.nodes[a.Parent].names[a.Name])
		delete(cl.nodes[a.Parent].names, a.Name)
	case *metarpc.RenameArgs:
		cl.nodes[a.NewParent].names[a.NewName] = cl.nodes[a.OldParent].names[a.OldName]
		delete(cl.nodes[a.OldParent].names, a.OldName)
	case *metarpc.TmpFileArgs:
		return metarpc.StatusOK, &metarpc.CreateResult{Attr: metarpc.Attr{ID: in(shard, 50), Mode: syscall.S_IFREG}, Created: true}
	case *metarpc.ReadDirArgs:
		r := &metarpc.ReadDirResult{EOF: true, Names: metarpc.LeaseNames}
		for i, name := range []string{"f0", "f1", "f2"} {
			attr, lease := as(child(a.ID, name))
			r.Entries = append(r.Entries, metarpc.DirEntry{Name: name, Cookie: uint64(20 + i), Attr: attr, Lease: lease})
		}
		return metarpc.StatusOK, r
	case *metarpc.LayoutCommitArgs:
		r := &metarpc.LayoutCommitResult{}
		for _, rep := range a.Reports {
			r.Attrs = append(r.Attrs, metarpc.Attr{ID: rep.ID, Size: rep.End})
		}
		return metarpc.StatusOK, r
	case *metarpc.LayoutGetArgs:
		return metarpc.StatusOK, &metarpc.LayoutResult{Segments: []metarpc.Segment{segment(0, 100, a.IOMode)}}
	case *metarpc.ReserveArgs:
		return metarpc.StatusOK, &metarpc.ReserveResult{Off: 1, Mtime: 1}
	}
	switch op {
	case metarpc.OpStatus:
		return metarpc.StatusOK, &metarpc.StatusResult{
			Program: "weftd", Grace: shard == 1, Garbage: 7, Copied: 1,
			Waiting:  []metarpc.WaitingFiles{{Device: layout.DeviceID{byte(shard)}, Files: 1}, {Device: layout.DeviceID{9}, Files: 2}},
			Sessions: []metarpc.SessionInfo{{Client: metarpc.ClientInfo{ID: [16]byte{9}}, Opens: 1}, {Client: metarpc.ClientInfo{ID: [16]byte{byte(shard)}}}},
		}
	case metarpc.OpMetaList, metarpc.OpMetaDrain:
		return metarpc.StatusOK, &metarpc.MetaListResult{Shards: 3}
	}
	return metarpc.StatusOK, op.NewResult()
}

// recall takes leases on an inode back, and waits until that is answered.
func (cl *cluster) recall(id layout.FileID, lease metarpc.Lease) {
	cl.t.Helper()
	s := cl.parts[layout.ShardOf(id, 3)]
	b, err := metarpc.AppendCallBack(nil, metarpc.Version, metarpc.BackHeader{Number: 1, Op: metarpc.BackLeaseRecall},
		&metarpc.LeaseRecallArgs{Items: []metarpc.LeaseItem{{ID: id, Lease: lease}}})
	if err != nil {
		cl.t.Fatal(err)
	}
	s.send(b)
	if r := <-s.backs; r.Status != metarpc.StatusOK {
		cl.t.Errorf("recall: %v", r.Status)
	}
}

// Each call is made in the session of the right shard, and sessions are begun when they are needed.
func TestShardsRoutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{Lending: func() []layout.DeviceID { return []layout.DeviceID{{1}} }})
		ctx, cred := t.Context(), metarpc.Cred{}
		dir, file, other := in(1, 1), in(1, 11), in(2, 1)
		if _, ok := v.CachedAttr(file); ok || v.CachedLayout(file, layout.IOModeRead, 0, 1) != nil || v.Alive(file) {
			t.Error("something is known of a shard that was not needed yet")
		}
		v.Forget(file)
		v.DropLayout(file, 0)
		v.DropExtents(file, 0)
		if v.Shards() != 3 || fmt.Sprint(cl.sessions) != "map[0:1]" {
			t.Errorf("%d shards, sessions of %v", v.Shards(), cl.sessions)
		}
		for _, c := range []struct {
			want string
			call func() error
		}{
			{"GETATTR@1", func() error { _, err := v.GetAttr(ctx, file); return err }},
			{"SETATTR@1", func() error { _, err := v.SetAttr(ctx, cred, &metarpc.SetAttrArgs{ID: file}); return err }},
			{"SETXATTR@1", func() error { return v.SetXattr(ctx, cred, file, "user.a", nil, 0) }},
			{"REMOVEXATTR@1", func() error { return v.RemoveXattr(ctx, cred, file, "user.a") }},
			{"OPEN@1", func() error { _, err := v.Open(ctx, cred, &metarpc.OpenArgs{ID: file}); return err }},
			{"LAYOUTGET@1", func() error { _, err := v.Layout(ctx, file, layout.IOModeRW, 0, 1, Anywhere); return err }},
			{"LAYOUTGET@1", func() error { _, err := v.Renew(ctx, file); return err }},
			{"LAYOUTGET@1", func() error { _, _, err := v.Pin(ctx, file, layout.IOModeRead, metarpc.PinAny); return err }},
			{"RESERVE@1", func() error {
				return v.Reserve(ctx, &metarpc.ReserveArgs{ID: file, Len: 1}, func(metarpc.ReserveResult) {})
			}},
			{"DESCRIBELAYOUT@1", func() error { _, err := v.DescribeLayout(ctx, file); return err }},
			{"LOCK@1", func() error { return setLock(v, ctx, &metarpc.LockArgs{ID: file, Type: metarpc.LockWrite, End: 9}) }},
			{"TESTLOCK@1", func() error { _, err := v.TestLock(ctx, &metarpc.LockArgs{ID: file}); return err }},
			{"LOCK@1", func() error { <-v.DropLocks(file, false, 0, nil); return nil }},
			{"LAYOUTERROR@1", func() error { return v.LayoutError(ctx, file, nil, "") }},
			{"LAYOUTMOVE@1", func() error { _, err := v.LayoutMove(ctx, cred, file, layout.DeviceID{1}); return err }},
			{"CACHESTART@1", func() error {
				_, err := v.CacheStart(ctx, cred, &metarpc.CacheStartArgs{ID: file, Devices: make([]layout.DeviceID, 1)})
				return err
			}},
			{"CACHEDONE@1", func() error { return v.CacheDone(ctx, file, metarpc.CopyRef{Handle: []byte{1}}) }},
			{"CACHEDROP@1", func() error { _, err := v.CacheDrop(ctx, cred, file, layout.DeviceID{}); return err }},
			{"READLINK@1", func() error { _, err := v.ReadLink(ctx, cred, file); return err }},
			{"CREATE@1", func() error {
				_, _, err := v.Create(ctx, cred, &metarpc.CreateArgs{Parent: dir, Name: "new"})
				return err
			}},
			{"TMPFILE@1", func() error { _, err := v.TmpFile(ctx, cred, &metarpc.TmpFileArgs{Parent: dir}); return err }},
			{"MAKENODE@1", func() error {
				_, err := v.MakeNode(ctx, cred, &metarpc.MakeNodeArgs{Parent: dir, Name: "dir", Mode: syscall.S_IFDIR})
				return err
			}},
			{"READDIR@1", func() error { _, err := v.ReadDir(ctx, cred, dir, 0, 10); return err }},
			{"LINK@1", func() error { _, err := v.Link(ctx, cred, file, other, "link"); return err }},
			{"LOOKUP@1 REMOVE@1", func() error { return v.Remove(ctx, cred, dir, "new", false) }},
			{"RENAME@1", func() error {
				return v.Rename(ctx, cred, &metarpc.RenameArgs{OldParent: dir, OldName: "f0", NewParent: other, NewName: "x"})
			}},
			{"LOOKUP@1 LOOKUP@1 RENAME@1", func() error {
				return v.Rename(ctx, cred, &metarpc.RenameArgs{OldParent: dir, OldName: "f1", NewParent: dir, NewName: "dir"})
			}},
			{"STATFS@0", func() error { _, err := v.StatFS(ctx, layout.RootID); return err }},
			{"DEVICES@0", func() error { _, err := v.Devices(ctx); return err }},
			{"ADDDEVICE@0", func() error { _, err := v.AddDevice(ctx, "nfs://h/e", false); return err }},
			{"REMOVEDEVICE@0", func() error { return v.RemoveDevice(ctx, layout.DeviceID{1}, false) }},
			{"METALIST@0", func() error { _, err := v.MetaList(ctx); return err }},
			{"METADRAIN@0", func() error { _, err := v.MetaDrain(ctx, "a:1", false); return err }},
		} {
			if err := c.call(); err != nil {
				t.Errorf("%s: %v", c.want, err)
			}
			if got := cl.executed(); got != c.want {
				t.Errorf("called %s, want %s", got, c.want)
			}
		}
		v.Release(file)
		if fmt.Sprint(cl.sessions) != "map[0:1 1:1]" {
			t.Errorf("sessions of %v, want of shards 0 and 1", cl.sessions)
		}
		st := v.State()
		if !st.Connected || len(st.Sessions) != 2 || st.Sessions[1].Shard != 1 || st.Sessions[1].Addr != "b:1" || st.Ring.Epoch != 1 || st.Calls[metarpc.OpGetAttr] != 1 {
			t.Errorf("state %+v", st)
		}
		sum, err := v.Status(ctx)
		if err != nil || len(sum.Sessions) != 3 || !sum.Grace || sum.Garbage != 7 || sum.Copied != 2 || sum.Sessions[0].Opens != 2 {
			t.Errorf("status %+v, %v", sum, err)
		}
		waiting := map[layout.DeviceID]int64{}
		for _, w := range sum.Waiting {
			waiting[w.Device] += w.Files
		}
		if want := (map[layout.DeviceID]int64{{0}: 1, {1}: 1, {9}: 4}); len(sum.Waiting) != 3 || !maps.Equal(waiting, want) {
			t.Errorf("waiting: %v, want %v", sum.Waiting, want)
		}
	})
}

// A name is kept by the session of its directory and what it leads to by that of the inode; each forgets by itself.
func TestShardsLookup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{})
		ctx, cred := t.Context(), metarpc.Cred{}
		dir, file := in(0, 1), in(1, 10)
		lookup := func(what, want string) {
			t.Helper()
			a, err := v.Lookup(ctx, cred, dir, "f1")
			if err != nil || a.Attr != cl.nodes[file].attr || a.Keep <= 0 || a.KeepName <= 0 {
				t.Errorf("%s: %+v, %v", what, a, err)
			}
			if got := cl.executed(); got != want {
				t.Errorf("%s: called %q, want %q", what, got, want)
			}
		}
		lookup("first", "LOOKUP@0 GETATTR@1")
		lookup("again", "")
		cl.recall(file, metarpc.LeaseAttrs)
		lookup("attributes recalled", "GETATTR@1")
		cl.recall(dir, metarpc.LeaseNames)
		lookup("names recalled", "LOOKUP@0")
		if _, err := v.ReadDir(ctx, cred, dir, 0, 10); err != nil {
			t.Fatal(err)
		}
		lookup("after a list, which knows less", "READDIR@0")

		// The name outlives its inode, which was removed in between: it is asked for again.
		cl.mu.Lock()
		delete(cl.nodes, file)
		cl.mu.Unlock()
		cl.recall(file, metarpc.LeaseAttrs)
		cl.recall(dir, metarpc.LeaseNames)
		if a, err := v.Lookup(ctx, cred, dir, "f1"); !errors.Is(err, error(errNoName)) || a.KeepName <= 0 {
			t.Errorf("removed: %+v, %v", a, err)
		}
		if got := cl.executed(); got != "LOOKUP@0 LOOKUP@0 GETATTR@1" {
			t.Errorf("removed: called %q", got)
		}

		// As long as the other service is away, the time for which the name may be kept gets shorter.
		gate := make(chan struct{})
		cl.mu.Lock()
		cl.hold[2] = gate
		cl.mu.Unlock()
		begun := time.Now()
		time.AfterFunc(5*time.Second, func() { close(gate) })
		a, err := v.Lookup(ctx, cred, dir, "f2")
		if full := fullLease(cl.parts[0].lease); err != nil || time.Since(begun) < 5*time.Second || a.KeepName > full-5*time.Second || a.Keep <= 0 {
			t.Errorf("%+v, %v after %v", a, err, time.Since(begun))
		}
		// Others do not wait meanwhile.
		cl.mu.Lock()
		cl.hold[2] = make(chan struct{})
		cl.mu.Unlock()
		cl.recall(in(2, 10), metarpc.LeaseAttrs)
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := v.Lookup(short, cred, dir, "f2"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("of a service that does not answer: %v", err)
		}
		begun = time.Now()
		if _, err := v.Lookup(ctx, cred, dir, "f0"); err != nil || time.Since(begun) > 0 {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

// A file that Create finds is opened in the session of its own shard.
func TestShardsCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{})
		ctx, cred := t.Context(), metarpc.Cred{}
		dir, file := in(0, 1), in(1, 10)
		args := &metarpc.CreateArgs{Parent: dir, Name: "f1", Mode: 0o600}
		a, created, err := v.Create(ctx, cred, args)
		if got := cl.executed(); err != nil || created || a.Attr != cl.nodes[file].attr || a.Keep <= 0 || got != "CREATE@0 OPEN@1" {
			t.Errorf("found: %+v, created %t, %v, called %q", a, created, err, got)
		}
		if v.of(dir).opens.holds(file) || !v.of(file).opens.holds(file) {
			t.Error("the file is not open where it belongs")
		}
		cl.mu.Lock()
		cl.nodes[file].attr.Mode &^= 0o777
		cl.mu.Unlock()
		if _, _, err := v.Create(ctx, cred, args); lockStatus(err) != metarpc.Status(syscall.EACCES) {
			t.Errorf("found without permission: %v", err)
		}
		cl.executed()
		// It is removed between the two calls: there is a new one then.
		cl.mu.Lock()
		delete(cl.nodes, file)
		cl.mu.Unlock()
		a, created, err = v.Create(ctx, cred, args)
		if got := cl.executed(); err != nil || !created || layout.ShardOf(a.Attr.ID, 3) != 0 || got != "CREATE@0 CREATE@0 OPEN@1" {
			t.Errorf("vanished: %+v, created %t, %v, called %q", a, created, err, got)
		}
		d, err := v.MakeNode(ctx, cred, &metarpc.MakeNodeArgs{Parent: dir, Name: "d", Mode: syscall.S_IFDIR | 0o700})
		if err != nil || d.Attr.Mode != syscall.S_IFDIR|0o700 || d.Keep != 0 || v.of(dir).foreign(d.Attr.ID) != true {
			t.Errorf("directory: %+v, %v", d, err)
		}
	})
}

// What a change makes wrong is not known afterwards, in whichever session it was.
func TestShardsChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{})
		ctx, cred := t.Context(), metarpc.Cred{}
		know := func(ids ...layout.FileID) {
			t.Helper()
			for _, id := range ids {
				if _, err := v.GetAttr(ctx, id); err != nil {
					t.Fatal(err)
				}
				if _, ok := v.CachedAttr(id); !ok {
					t.Fatalf("the attributes of %d are not kept", id)
				}
			}
		}
		known := func(what string, id layout.FileID, want bool) {
			t.Helper()
			if _, ok := v.CachedAttr(id); ok != want {
				t.Errorf("%s: known %t, want %t", what, ok, want)
			}
		}
		d0, d1, mine, other := in(0, 1), in(1, 1), in(0, 10), in(0, 11)
		// d1/f0 is inode other, of shard 0, which does not tell who asks that it has changed.
		for _, name := range []string{"f0", "f1"} {
			if _, err := v.Lookup(ctx, cred, d0, name); err != nil {
				t.Fatal(err)
			}
		}
		know(d0, mine, other)
		if err := v.Rename(ctx, cred, &metarpc.RenameArgs{OldParent: d0, OldName: "f0", NewParent: d1, NewName: "new", Flags: metarpc.RenameNoReplace}); err != nil {
			t.Fatal(err)
		}
		known("what was renamed", mine, false)
		known("what cannot have been replaced", other, true)
		if got := cl.executed(); strings.Contains(got, "@1 ") || strings.HasSuffix(got, "@1") && !strings.Contains(got, "GETATTR@1") {
			t.Errorf("called %s", got)
		}
		know(d0, mine, other)
		if err := v.Rename(ctx, cred, &metarpc.RenameArgs{OldParent: d0, OldName: "f1", NewParent: d1, NewName: "f0"}); err != nil {
			t.Fatal(err)
		}
		known("what was replaced", other, false)
		cl.executed()
		if _, err := v.Lookup(ctx, cred, d0, "f1"); !errors.Is(err, error(errNoName)) {
			t.Errorf("the old name: %v", err)
		}
		if got := cl.executed(); got != "LOOKUP@0" {
			t.Errorf("the old name: called %q", got)
		}
		// The name that Link makes is the directory's session's to know.
		a, err := v.Link(ctx, cred, in(0, 12), d1, "link")
		if err != nil || a.KeepName != 0 || a.Keep <= 0 {
			t.Errorf("link: %+v, %v", a, err)
		}
		if st := v.of(d0).leases; len(st.pending)+len(st.nameChanges)+len(st.changes) != 0 || st.unknown != 0 {
			t.Errorf("changes are left: %+v", st.changes)
		}
	})
}

// An answer about an inode of one shard that was asked for before a recall arrived is not kept, though the change that the recall is for was made
// by another session of the same client.
func TestShardsRemove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{})
		ctx, cred := t.Context(), metarpc.Cred{}
		dir, file := in(0, 1), in(1, 10)
		if _, err := v.Lookup(ctx, cred, dir, "f1"); err != nil {
			t.Fatal(err)
		}
		// As the service does it: recall, commit, answer; an answer from before it is under way all the time.
		inner := cl.parts[0].handle
		cl.parts[0].handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if op == metarpc.OpRemove {
				cl.recall(file, metarpc.LeaseAttrs)
			}
			return inner(op, args)
		}
		gate, asked := make(chan struct{}), make(chan struct{})
		at := cl.parts[1].handle
		cl.parts[1].handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			status, r := at(op, args)
			if op == metarpc.OpGetAttr {
				close(asked)
				<-gate
			}
			return status, r
		}
		cl.recall(file, metarpc.LeaseAttrs)
		got := make(chan error, 1)
		go func() { // ends with the answer
			_, err := v.GetAttr(ctx, file)
			got <- err
		}()
		<-asked
		if err := v.Remove(ctx, cred, dir, "f1", false); err != nil {
			t.Fatal(err)
		}
		if _, ok := v.CachedAttr(file); ok {
			t.Error("attributes of what was removed are known")
		}
		close(gate)
		if err := <-got; err != nil {
			t.Error(err)
		}
		if _, ok := v.CachedAttr(file); ok {
			t.Error("an answer of before was kept")
		}
		if _, err := v.Lookup(ctx, cred, dir, "f1"); !errors.Is(err, error(errNoName)) {
			t.Errorf("the name: %v", err)
		}
	})
}

// A shard that moves is a service that was restarted: with the session go on what is open and what was called, and other shards notice nothing.
func TestShardsMove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		var mu sync.Mutex
		var resets []string
		v := cl.connect(Config{
			OnReset: func(_ context.Context, shard int, lost bool) {
				mu.Lock()
				defer mu.Unlock()
				resets = append(resets, fmt.Sprint(shard, lost))
			},
			OnLost: func(shard int) { t.Errorf("session of shard %d lost", shard) },
		})
		ctx := t.Context()
		for shard := range 3 {
			if _, err := v.Open(ctx, metarpc.Cred{}, &metarpc.OpenArgs{ID: in(shard, 10)}); err != nil {
				t.Fatal(err)
			}
		}
		session := v.State().Sessions[1].Session
		cl.executed()
		cl.mu.Lock()
		cl.tries = nil
		cl.mu.Unlock()
		cl.move(1, 2)
		begun := time.Now()
		if _, err := v.SetAttr(ctx, metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)}); err != nil || time.Since(begun) > backoffMin {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		synctest.Wait()
		if got := cl.executed(); got != "OPEN@1 SETATTR@1" && got != "SETATTR@1 OPEN@1" {
			t.Errorf("called %q", got)
		}
		if st := v.State(); st.Sessions[1].Session != session || st.Sessions[1].Addr != "c:1" || st.Ring.Epoch != 2 || st.Reconnects != 1 {
			t.Errorf("state %+v", st)
		}
		if got := fmt.Sprint(cl.tries); got != "[b:1 c:1]" {
			t.Errorf("tried %s", got)
		}
		if got := fmt.Sprint(resets); got != "[1 false]" {
			t.Errorf("resets %v", got)
		}
		if _, ok := v.CachedAttr(in(0, 10)); !ok {
			t.Error("what another shard has told is forgotten")
		}
		// For a while nobody has it. It is asked for again and again, and others go on.
		cl.move(1, -1)
		synctest.Wait()
		time.Sleep(10 * time.Second)
		cl.mu.Lock()
		n := len(cl.tries)
		cl.mu.Unlock()
		if n < 3*15 || n > 3*50 {
			t.Errorf("%d connections in 10 s", n)
		}
		begun = time.Now()
		if _, err := v.SetAttr(ctx, metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(2, 10)}); err != nil || time.Since(begun) > 0 {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		if st := v.State(); st.Connected || st.Problem == nil || st.Addr != "c:1" || !errors.Is(st.Problem, errMoved) {
			t.Errorf("state %+v", st)
		}
		if _, err := v.StatFS(ctx, layout.RootID); err != nil {
			t.Error(err)
		}
		cl.move(1, 0)
		begun = time.Now()
		if _, err := v.SetAttr(ctx, metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)}); err != nil || time.Since(begun) > movedPause {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

// Where a session is lost, what others have said holds.
func TestShardsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		var mu sync.Mutex
		var told []string
		tell := func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, fmt.Sprintf(format, args...))
		}
		v := cl.connect(Config{
			OnLost:  func(shard int) { tell("lost %d", shard) },
			OnReset: func(_ context.Context, shard int, lost bool) { tell("reset %d %t", shard, lost) },
			OnLeaseRecall: func(_ context.Context, items []metarpc.LeaseItem) {
				for _, it := range items {
					if layout.ShardOf(it.ID, 3) != 2 {
						t.Errorf("inode %d is to be forgotten", it.ID)
					}
				}
			},
		})
		for shard := range 3 {
			if _, err := v.GetAttr(t.Context(), in(shard, 10)); err != nil {
				t.Fatal(err)
			}
		}
		cl.parts[2].forget()
		cl.move(2, 0)
		time.Sleep(time.Second)
		synctest.Wait()
		if got := fmt.Sprint(told); got != "[lost 2 reset 2 true]" {
			t.Errorf("told %s", got)
		}
		for shard := range 3 {
			if _, ok := v.CachedAttr(in(shard, 10)); ok != (shard != 2) || !v.Alive(in(shard, 10)) {
				t.Errorf("shard %d: known %t", shard, ok)
			}
		}
		if fmt.Sprint(cl.sessions) != "map[0:1 1:1 2:2]" {
			t.Errorf("sessions %v", cl.sessions)
		}
	})
}

// Services that do not answer are not waited for as long as there are others, and the ring may be wrong.
func TestShardsUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{})
		if _, err := v.GetAttr(t.Context(), in(1, 10)); err != nil {
			t.Fatal(err)
		}
		// The host of b:1 dies, and c:1 takes its shard. Nobody has told the client of that.
		cl.dead["b:1"] = silent
		cl.move(1, 2)
		begun := time.Now()
		if _, err := v.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)}); err != nil || time.Since(begun) > 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		// A ring that is newer and wrong: everybody else is asked as well.
		cl.mu.Lock()
		cl.told = &metarpc.Ring{Epoch: 100, Services: []string{"a:1", "b:1", "c:1", "d:1"}, Owners: []int{0, 0, 3}}
		cl.mu.Unlock()
		cl.move(1, 2)
		if _, err := v.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)}); err != nil || v.State().Ring.Epoch != 100 {
			t.Errorf("%v, ring %+v", err, v.State().Ring)
		}
		if _, err := v.GetAttr(t.Context(), in(2, 10)); err != nil { // said to be at d:1, where nobody is
			t.Error(err)
		}
	})
}

func TestShardsDial(t *testing.T) {
	for _, c := range []struct {
		name    string
		addrs   []string
		prepare func(*cluster)
		shard   int // of the session that Dial begins
		after   time.Duration
		err     string
	}{
		{name: "the one", addrs: []string{"a:1"}},
		{name: "another one", addrs: []string{"c:1"}},
		{name: "the second of two", addrs: []string{"nowhere:1", "b:1"}},
		{name: "all", addrs: []string{"c:1", "b:1", "a:1"}},
		{name: "root refuses", addrs: []string{"b:1"}, prepare: func(cl *cluster) { cl.dead["a:1"] = refuses }, shard: 1},
		{name: "root is silent", addrs: []string{"a:1", "c:1"}, prepare: func(cl *cluster) { cl.dead["a:1"] = silent }, shard: 1, after: 3 * time.Second},
		{name: "nobody has the root", addrs: []string{"c:1"}, prepare: func(cl *cluster) { cl.ring.Owners[0] = -1 }, shard: 1},
		{name: "soon somebody has", addrs: []string{"c:1"}, prepare: func(cl *cluster) {
			cl.ring.Owners = []int{-1, -1, -1}
			time.AfterFunc(5*time.Second, func() { cl.move(0, 1) })
		}, after: 6 * time.Second},
		{name: "nobody has anything", addrs: []string{"c:1"}, prepare: func(cl *cluster) { cl.ring.Owners = []int{-1, -1, -1} }, after: 30 * time.Second,
			err: "c:1 does not serve this part of the volume (shard 0)"},
		{name: "nobody there", addrs: []string{"x:1", "y:1"}, err: "y:1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cl := newCluster(t)
				if c.prepare != nil {
					c.prepare(cl)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				begun := time.Now()
				v, err := start(ctx, Config{Addrs: c.addrs, Log: quiet()}, cl.dial)
				if took := time.Since(begun); took > c.after {
					t.Errorf("it took %v", took)
				}
				if c.err != "" {
					if err == nil || !strings.Contains(err.Error(), c.err) {
						t.Errorf("%v, want %q", err, c.err)
					}
					cl.stop()
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if st := v.State(); len(st.Sessions) != 1 || st.Sessions[0].Shard != c.shard || len(st.Ring.Owners) != 3 {
					t.Errorf("state %+v", st)
				}
				if _, err := v.Devices(ctx); err != nil {
					t.Error(err)
				}
				if err := v.Close(ctx); err != nil {
					t.Error(err)
				}
				cl.stop()
			})
		})
	}
}

// A service of another volume at one of the addresses does not tell us where the shards of ours are.
func TestShardsOtherVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		asked := 0
		dial := func(ctx context.Context, addr string) (net.Conn, error) {
			if addr != "x:1" {
				return cl.dial(ctx, addr)
			}
			asked++
			client, server := net.Pipe()
			cl.tasks.Go(func() {
				defer server.Close()
				if _, err := metarpc.ReadFrame(server, nil, metarpc.MaxHello); err != nil {
					return
				}
				b, err := metarpc.AppendWelcome(nil, &metarpc.Welcome{Magic: metarpc.Magic, Version: metarpc.Version, Status: metarpc.StatusMoved, Volume: [16]byte{0xbb},
					Ring: metarpc.Ring{Epoch: 100, Services: []string{"x:1"}, Owners: []int{0, 0, 0}}})
				if err != nil {
					t.Error(err)
				}
				server.Write(b)
			})
			return client, nil
		}
		v, err := start(t.Context(), Config{Addrs: []string{"a:1", "x:1"}, Log: quiet()}, dial)
		if err != nil {
			t.Fatal(err)
		}
		defer cl.stop()
		defer v.Close(t.Context())
		cl.move(0, -1)
		time.Sleep(10 * time.Second)
		if epoch := v.State().Ring.Epoch; asked == 0 || epoch != 2 {
			t.Errorf("the ring is that of epoch %d after the other volume's service was asked %d times", epoch, asked)
		}
		cl.move(0, 1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := v.StatFS(ctx, layout.RootID); err != nil {
			t.Error(err)
		}
	})
}

// Sizes of files of several shards are reported together, and a shard that is away keeps only its own from being so.
func TestShardsCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{})
		var reports []metarpc.SizeReport
		for i := range 9 {
			reports = append(reports, metarpc.SizeReport{ID: in(i%3, 10+i/3), End: int64(100 + i)})
		}
		attrs, err := v.LayoutCommit(t.Context(), reports, true)
		if err != nil || len(attrs) != len(reports) {
			t.Fatalf("%v, %v", attrs, err)
		}
		for i := range attrs {
			if attrs[i].ID != reports[i].ID || attrs[i].Size != reports[i].End {
				t.Errorf("report %d was answered with %+v", i, attrs[i])
			}
		}
		if got := cl.executed(); got != "LAYOUTCOMMIT@0 LAYOUTCOMMIT@1 LAYOUTCOMMIT@2" {
			t.Errorf("called %q", got)
		}
		if _, err := v.LayoutCommit(t.Context(), []metarpc.SizeReport{reports[1], reports[4]}, true); err != nil {
			t.Fatal(err)
		}
		if got := cl.executed(); got != "LAYOUTCOMMIT@1" {
			t.Errorf("called %q", got)
		}
		if attrs, err := v.LayoutCommit(t.Context(), nil, true); err != nil || len(attrs) != 0 {
			t.Errorf("nothing: %v, %v", attrs, err)
		}
		cl.move(1, -1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := v.LayoutCommit(ctx, reports, true); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("one shard is away: %v", err)
		}
		if got := cl.executed(); got != "LAYOUTCOMMIT@0 LAYOUTCOMMIT@2" {
			t.Errorf("one shard is away: called %q", got)
		}
	})
}

// Closing ends all sessions at the same time, and waits for none that there is not.
func TestShardsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		var reports int
		v, err := start(t.Context(), Config{Addrs: []string{"a:1"}, Log: quiet(), UsagePeriod: time.Second, Usage: func() []metarpc.DeviceStats {
			reports++
			return []metarpc.DeviceStats{{Outstanding: 1}}
		}}, cl.dial)
		if err != nil {
			t.Fatal(err)
		}
		cl.move(2, -1)
		if _, err := v.GetAttr(t.Context(), in(1, 10)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := v.GetAttr(ctx, in(2, 10)); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		time.Sleep(3500 * time.Millisecond)
		synctest.Wait()
		if got := cl.executed(); got != strings.TrimSuffix(strings.Repeat("LAYOUTSTATS@0 ", reports), " ")+" GETATTR@1" {
			t.Errorf("called %q, want %d reports at one shard", got, reports)
		}
		for _, shard := range []int{0, 1} {
			s := cl.parts[shard]
			at := s.handle
			s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
				if op == metarpc.OpEndSession {
					time.Sleep(3 * time.Second)
				}
				return at(op, args)
			}
		}
		begun := time.Now()
		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := v.Close(ctx); err != nil || time.Since(begun) > 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		if got := cl.executed(); got != "ENDSESSION@0 ENDSESSION@1" {
			t.Errorf("called %q", got)
		}
		for shard := range 3 {
			if _, err := v.GetAttr(t.Context(), in(shard, 11)); !errors.Is(err, ErrClosed) {
				t.Errorf("shard %d after the end: %v", shard, err)
			}
		}
		cl.stop()
	})
}

// Shards that move all the time cost time, but neither calls nor second executions.
func TestShardsChurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{Addrs: []string{"nowhere:1", "c:1"}})
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		rng := rand.New(rand.NewPCG(seed, 1))
		ctx, stop := context.WithCancel(t.Context())
		var moving, working sync.WaitGroup
		moving.Go(func() {
			for sleep(ctx, time.Duration(rng.IntN(300))*time.Millisecond) {
				cl.move(rng.IntN(3), rng.IntN(4)-1)
			}
			for shard := range 3 {
				cl.move(shard, rng.IntN(3))
			}
		})
		for w := range 8 {
			working.Go(func() {
				for i := range 40 {
					name := fmt.Sprint(w, "-", i)
					dir := in((w+i)%3, 1)
					a, err := v.MakeNode(t.Context(), metarpc.Cred{}, &metarpc.MakeNodeArgs{Parent: dir, Name: name, Mode: syscall.S_IFDIR | 0o755})
					if err != nil {
						t.Errorf("%s: %v", name, err) // EEXIST if it was executed twice
						return
					}
					if i%2 == 0 {
						if b, err := v.Lookup(t.Context(), metarpc.Cred{}, dir, name); err != nil || b.Attr.ID != a.Attr.ID {
							t.Errorf("%s: %+v, %v", name, b, err)
						}
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
		working.Wait()
		stop()
		moving.Wait()
		t.Logf("%d reconnects", v.State().Reconnects)
		if v.State().Reconnects == 0 {
			t.Error("nothing moved")
		}
	})
}

// What is cached costs nothing more for being behind a Volume.
func TestShardsAllocate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{})
		dir, file := in(0, 1), in(1, 10)
		if _, err := v.Lookup(t.Context(), metarpc.Cred{}, dir, "f1"); err != nil {
			t.Fatal(err)
		}
		if _, err := v.Layout(t.Context(), file, layout.IOModeRead, 0, 1, Anywhere); err != nil {
			t.Fatal(err)
		}
		for name, f := range map[string]func(){
			"CachedAttr":   func() { v.CachedAttr(file) },
			"CachedLayout": func() { v.CachedLayout(file, layout.IOModeRead, 0, 1) },
			"Lookup":       func() { v.Lookup(t.Context(), metarpc.Cred{}, dir, "f1") },
			"Alive":        func() { v.Alive(file) },
		} {
			if n := testing.AllocsPerRun(100, f); n != 0 {
				t.Errorf("%s allocates %v times", name, n)
			}
		}
	})
}

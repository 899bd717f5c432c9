package coherence

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/test/harness"
)

// bare is a client without a mount, which speaks the metadata protocol, and answers no callbacks.
type bare struct {
	t       *testing.T
	conn    net.Conn
	welcome *metarpc.Welcome
	seq     uint64
}

// dialBare connects to the service that has an inode.
func dialBare(t *testing.T, v *harness.Volume, who metarpc.ClientInfo, id layout.FileID) *bare {
	t.Helper()
	hello := &metarpc.Hello{Magic: metarpc.Magic, Lowest: metarpc.Lowest, Highest: metarpc.Version, Client: who}
	addrs := strings.Split(v.Addr, ",")
	for try := range 2 * len(addrs) { // the first one may only tell how many shards there are
		c := greet(t, addrs[try%len(addrs)], hello)
		shard := layout.ShardOf(id, len(c.welcome.Ring.Owners))
		if c.welcome.Status == metarpc.StatusOK && hello.Shard == shard {
			return c
		}
		c.conn.Close()
		hello.Shard = shard
	}
	t.Fatalf("no service has inode %d", id)
	return nil
}

// greet says hello to a service.
func greet(t *testing.T, addr string, hello *metarpc.Hello) *bare {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	b, err := metarpc.AppendHello(nil, hello)
	if err == nil {
		_, err = conn.Write(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	conn.SetReadDeadline(time.Now().Add(time.Minute))
	frame, err := metarpc.ReadFrame(conn, nil, metarpc.MaxHello)
	if err != nil {
		t.Fatal(err)
	}
	w, err := metarpc.ParseWelcome(frame, metarpc.Spoken)
	if err != nil || w.Status != metarpc.StatusOK && w.Status != metarpc.StatusMoved {
		t.Fatalf("welcome %+v, %v", w, err)
	}
	return &bare{t: t, conn: conn, welcome: w}
}

// call makes a call as root and waits for its answer.
func (c *bare) call(op metarpc.Op, args, result any) metarpc.Status {
	c.t.Helper()
	c.seq++
	b, err := metarpc.AppendCall(nil, metarpc.CallHeader{Sequence: c.seq, Op: op}, args)
	if err == nil {
		_, err = c.conn.Write(b)
	}
	if err != nil {
		c.t.Fatalf("%v: %v", op, err)
	}
	for {
		frame, err := metarpc.ReadFrame(c.conn, nil, metarpc.MaxFrame)
		if err != nil {
			c.t.Fatalf("%v: %v", op, err)
		}
		if kind, _ := metarpc.FrameKind(frame); kind != metarpc.KindReply {
			continue
		}
		h, body, err := metarpc.ParseReplyHeader(frame)
		if err == nil && h.Status == metarpc.StatusOK {
			err = metarpc.DecodeResult(op, body, result)
		}
		if err != nil {
			c.t.Fatalf("%v: %v", op, err)
		}
		return h.Status
	}
}

func (c *bare) must(op metarpc.Op, args, result any) {
	c.t.Helper()
	if s := c.call(op, args, result); s != metarpc.StatusOK {
		c.t.Fatalf("%v: %v", op, s)
	}
}

func inode(t *testing.T, path string) layout.FileID {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return layout.FileID(st.Ino)
}

// TestSameIdentity has a second client with the identity of a mount, as when a machine is cloned: it is another client all
// the same, with a session, locks and leases of its own.
func TestSameIdentity(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	m := v.Mount(mountOptions()...)
	f := open(t, m.Dir+"/f", os.O_RDWR|os.O_CREATE)
	if err := lock(f, unix.F_OFD_SETLK, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	id := inode(t, m.Dir+"/f")
	looker := dialBare(t, v, metarpc.ClientInfo{ID: [16]byte{1}, Host: "looker"}, id)
	var status metarpc.StatusResult
	looker.must(metarpc.OpStatus, &metarpc.Empty{}, &status)
	var who metarpc.ClientInfo
	for _, s := range status.Sessions {
		if s.Client.Mount == m.Dir {
			who = s.Client
		}
	}
	if who.ID == [16]byte{} {
		t.Fatalf("no session of the mount in %+v", status.Sessions)
	}
	twin := dialBare(t, v, who, id)
	looker.must(metarpc.OpStatus, &metarpc.Empty{}, &status)
	count := 0
	for _, s := range status.Sessions {
		if s.Client.ID == who.ID {
			count++
		}
	}
	if count != 2 {
		t.Errorf("%d sessions of two clients with one identity", count)
	}
	twin.must(metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: metarpc.AccessRead | metarpc.AccessWrite}, &metarpc.AttrResult{})
	got := twin.call(metarpc.OpLock, &metarpc.LockArgs{ID: id, Owner: 1, Type: metarpc.LockWrite, End: 1<<63 - 1}, &metarpc.Empty{})
	if got.Errno() != unix.EAGAIN {
		t.Errorf("the twin gets a lock that the mount has: %v", got)
	}
	// The mount notices nothing, neither now nor when the twin is gone.
	for _, when := range []string{"with the twin", "without it"} {
		within(t, lease+patience, "work "+when, func() error {
			_, err := f.WriteAt([]byte(when), 0)
			return errors.Join(err, f.Sync(), os.WriteFile(m.Dir+"/"+when, nil, 0o644))
		})
		twin.conn.Close()
		time.Sleep(lease + time.Second)
	}
	if err := lock(f, unix.F_OFD_SETLK, unix.F_UNLCK); err != nil {
		t.Error(err)
	}
}

// TestDeaf has a client that takes leases and never answers a recall: its session ends, and others wait no longer than
// its lease.
func TestDeaf(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	m := v.Mount(mountOptions()...)
	if err := errors.Join(os.Mkdir(m.Dir+"/dir", 0o755), os.WriteFile(m.Dir+"/dir/f", nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	dir := inode(t, m.Dir+"/dir")
	deaf := dialBare(t, v, metarpc.ClientInfo{ID: [16]byte{2}, Host: "deaf"}, dir)
	var seen metarpc.LookupResult
	deaf.must(metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "f"}, &seen)
	if seen.Names != metarpc.LeaseNames || seen.Lease != metarpc.LeaseAttrs {
		t.Fatalf("leases %d on the directory and %d on the file, want both", seen.Names, seen.Lease)
	}
	within(t, lease+patience, "unlink what a deaf client has leased", func() error { return os.Remove(m.Dir + "/dir/f") })
	within(t, time.Second, "create there", func() error { return os.WriteFile(m.Dir+"/dir/f", nil, 0o644) })
}

// TestOtherClock has one of the mounts in a time namespace where the machine has been up ten days longer: leases are
// lengths of time, not times.
func TestOtherClock(t *testing.T) {
	unshare := []string{"unshare", "-T", "--monotonic", "864000", "--boottime", "864000"}
	if out, err := exec.Command(unshare[0], append(unshare[1:], "true")...).CombinedOutput(); err != nil {
		t.Skipf("missing: time namespaces: %s", out)
	}
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	all := []*harness.Mount{v.Mount(mountOptions()...), v.MountUnder(unshare, mountOptions()...)}
	observe(t, all, min(pairCount(), 150), *seed)
	// Past the lease what was kept is asked for again.
	path := fmt.Sprint(all[1].Dir, "/pairs")
	inode(t, path)
	time.Sleep(lease + time.Second)
	if err := os.Chmod(all[0].Dir+"/pairs", 0o700); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o700 {
		t.Fatalf("%v, %v", st, err)
	}
}

package data

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
)

// FuzzConn sends arbitrary bytes to a server: it answers with whole records or closes the connection, and holds no
// memory for payloads and no request afterwards. The handles of seeds are replaced by what stands for them, since they
// are others in every run.
func FuzzConn(f *testing.F) {
	ts := start(f, ramDir(f))
	c := ts.dial()
	file := c.create(ts.root, "f", 0, 0)
	c.put(file, 0, []byte("data"))
	root, fh := ts.root.Bytes(), file.Bytes()
	rootMark, fileMark := bytes.Repeat([]byte("R"), len(root)), bytes.Repeat([]byte("F"), len(fh))

	seed := func(calls ...[]byte) {
		b := bytes.Join(calls, nil)
		b = bytes.ReplaceAll(b, root, rootMark)
		f.Add(bytes.ReplaceAll(b, fh, fileMark))
	}
	where := wire.DirOpArgs{Dir: ts.root, Name: "n"}
	for proc, args := range map[wire.Proc]appender{
		wire.ProcGetattr: &file, wire.ProcSetattr: &wire.SetattrArgs{FH: file, Attr: wire.Sattr{SetSize: true, Size: 5}},
		wire.ProcLookup: &where, wire.ProcAccess: &wire.AccessArgs{FH: file, Access: 63}, wire.ProcReadlink: &file,
		wire.ProcRead:   &wire.ReadArgs{FH: file, Count: 100},
		wire.ProcWrite:  &writeCall{wire.WriteArgs{FH: file, Offset: 1}, []byte("abcde")},
		wire.ProcCreate: &wire.CreateArgs{Where: where}, wire.ProcMkdir: &wire.MkdirArgs{Where: where},
		wire.ProcSymlink: &symlinkArgs{Where: where, Target: "t"}, wire.ProcMknod: &mkfifoArgs{where},
		wire.ProcRemove: &where, wire.ProcRmdir: &where, wire.ProcRename: &wire.RenameArgs{From: where, To: where},
		wire.ProcLink: &wire.LinkArgs{FH: file, Link: where}, wire.ProcReaddir: &readdirArgs{Dir: ts.root, Count: 1000},
		wire.ProcReaddirPlus: &wire.ReaddirPlusArgs{Dir: ts.root, DirCount: 1000, MaxCount: 1000},
		wire.ProcFsstat:      &file, wire.ProcFsinfo: &file, wire.ProcPathconf: &file, wire.ProcCommit: &wire.CommitArgs{FH: file},
	} {
		call := marked(nfsCall(proc, super), args.Append(nil))
		seed(call)
		seed(call, call[:len(call)/2])
		seed(oncrpctest.AppendRecordMark(nil, 60, false), call[4:64], oncrpctest.AppendRecordMark(nil, len(call)-64, true), call[64:])
	}
	seed(marked(mountCall(wire.MountProcMnt), (&wire.MountPath{Path: "/"}).Append(nil)))
	seed(oncrpctest.AppendRecordMark(nil, oncrpc.MaxFragment, true))

	f.Fuzz(func(t *testing.T, b []byte) {
		b = bytes.ReplaceAll(b, rootMark, root)
		b = bytes.ReplaceAll(b, fileMark, fh)
		nc, server := net.Pipe()
		conn := newConn(ts.Server, server)
		ended, done := make(chan error, 1), make(chan error, 1)
		go func() { ended <- conn.serve() }()
		go func() { // ends with the connection
			for {
				if _, err := readRecord(nc); err != nil {
					done <- err
					return
				}
			}
		}()
		nc.SetDeadline(time.Now().Add(time.Minute))
		nc.Write(b)
		conn.drain()
		<-ended
		if err := <-done; err != io.EOF {
			t.Errorf("reply: %v", err)
		}
		nc.Close()
		if len(conn.slot) != maxRequests { // serve has taken all
			t.Errorf("%d slots", len(conn.slot))
		}
		if !ts.payloads.TryAcquire(maxPayloads) {
			t.Fatal("memory for payloads was not given back")
		}
		ts.payloads.Release(maxPayloads)
		if _, err := ts.describe(ts.rootFH); err != nil {
			t.Errorf("root: %v", err)
		}
	})
}

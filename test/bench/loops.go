package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// sample is how long one figure takes. A trial that only chooses among loops takes a fifth of that.
var sample = 2 * time.Second

const (
	dataSize = 512 << 20 // of the files that loops read and write, over all servers
	unit     = 1 << 20   // the stripe unit
)

// A workload is what loops do.
type workload struct {
	write  bool
	random bool
	size   int // bytes of a request
}

var (
	seqRead   = workload{size: 1 << 20}
	seqWrite  = workload{write: true, size: 1 << 20}
	randRead  = workload{random: true, size: 4 << 10}
	randWrite = workload{write: true, random: true, size: 4 << 10}
)

// figure is a loop's result in the unit of the rows: MB/s, or IOPS of small requests.
func (w workload) figure(requests int64, took time.Duration) float64 {
	if w.size < 64<<10 {
		return float64(requests) / took.Seconds()
	}
	return float64(requests) * float64(w.size) / 1e6 / took.Seconds()
}

// offsets are the offsets of a file's requests one after the other, or at random.
type offsets struct {
	workload
	next atomic.Int64
}

func (o *offsets) take() int64 {
	if o.random {
		return rand.Int64N(dataSize/int64(o.size)) * int64(o.size)
	}
	return (o.next.Add(1) - 1) * int64(o.size) % dataSize
}

// file is a data file on a server.
type file struct {
	addr   netip.AddrPort
	handle []byte // of NFS
	cred   layout.Credential
}

// A wireFormat is how the loop speaks to its server.
type wireFormat interface {
	// request appends a request, with the payload of a write to follow.
	request(b []byte, f *file, w workload, off int64) []byte
	// reply reads a reply, the payload of a read into buf.
	reply(in *bufio.Reader, w workload, buf []byte) error
}

// filesFormat is that of serve-files.
type filesFormat struct{}

func (filesFormat) request(b []byte, _ *file, w workload, off int64) []byte {
	what := uint32(0)
	if w.write {
		what = 1
	}
	b = binary.LittleEndian.AppendUint32(b, what)
	b = binary.LittleEndian.AppendUint32(b, uint32(w.size))
	return binary.LittleEndian.AppendUint64(b, uint64(off))
}

func (filesFormat) reply(in *bufio.Reader, w workload, buf []byte) error {
	var head [8]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return err
	}
	if n := binary.LittleEndian.Uint64(head[:]); n != uint64(w.size) {
		return fmt.Errorf("a reply about %d bytes, want %d", n, w.size)
	}
	if w.write {
		return nil
	}
	_, err := io.ReadFull(in, buf)
	return err
}

// nfsFormat is NFS version 3. All requests of a loop are alike, so it does not matter in which order replies come.
type nfsFormat struct{ cred oncrpc.Auth }

func newNFSFormat() nfsFormat {
	cred, err := (&oncrpc.AuthSys{Machine: "bench"}).Auth()
	if err != nil {
		panic(err)
	}
	return nfsFormat{cred}
}

var xids atomic.Uint32

func (n nfsFormat) request(b []byte, f *file, w workload, off int64) []byte {
	at := len(b)
	fh, err := wire.NewFileHandle(f.handle)
	if err != nil {
		panic(err)
	}
	call := oncrpc.Call{XID: xids.Add(1), Prog: oncrpc.ProgNFS, Vers: wire.Version, Proc: uint32(wire.ProcRead), Cred: n.cred}
	payload := 0
	if w.write {
		call.Proc, payload = uint32(wire.ProcWrite), w.size
	}
	b = call.Append(append(b, 0, 0, 0, 0))
	if w.write {
		b = (&wire.WriteArgs{FH: fh, Offset: uint64(off), Count: uint32(w.size)}).AppendHead(b)
	} else {
		b = (&wire.ReadArgs{FH: fh, Offset: uint64(off), Count: uint32(w.size)}).Append(b)
	}
	oncrpc.PutRecordMark(b[at:], len(b)-at-oncrpc.RecordMarkSize+payload, true)
	return b
}

func (nfsFormat) reply(in *bufio.Reader, w workload, buf []byte) error {
	var head [512]byte
	if _, err := io.ReadFull(in, head[:oncrpc.RecordMarkSize]); err != nil {
		return err
	}
	n, last := oncrpc.ParseRecordMark(head[:])
	if !w.write {
		n -= w.size
	}
	if !last || n < oncrpc.AcceptedSize || n > len(head) {
		return fmt.Errorf("a reply of %d bytes besides its payload", n)
	}
	if _, err := io.ReadFull(in, head[:n]); err != nil {
		return err
	}
	d := xdr.NewDecoder(head[:n])
	var reply oncrpc.Reply
	if err := errors.Join(reply.Decode(&d), reply.Err()); err != nil {
		return err
	}
	if w.write {
		var res wire.WriteRes
		if err := res.Decode(&d); err != nil || res.Status != wire.OK || int(res.Count) != w.size {
			return fmt.Errorf("WRITE: %v, %d bytes, %v", res.Status, res.Count, err)
		}
		return nil
	}
	var res wire.ReadRes
	if err := res.DecodeHead(&d, w.size); err != nil || res.Status != wire.OK || int(res.Count) != w.size {
		return fmt.Errorf("READ: %v, %d bytes, %v", res.Status, res.Count, err)
	}
	_, err := io.ReadFull(in, buf)
	return err
}

// loop is the simplest correct way to keep servers busy: conns connections to each, with depth requests outstanding on
// each, for so long. A file is striped over the servers.
func loop(format wireFormat, files []file, w workload, conns, depth int, long time.Duration) (float64, error) {
	var requests atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, len(files)*conns)
	begin := time.Now()
	for i := range files {
		all := &offsets{workload: w}
		for range conns {
			wg.Go(func() { // a connection
				errs <- loopConn(format, &files[i], w, depth, &requests, func() int64 {
					if time.Since(begin) > long {
						return noMore
					}
					off := all.take()
					if n := int64(len(files)); n > 1 { // the server's own columns, one after the other
						off = (off/unit*n + int64(i)) * unit % dataSize
					}
					return off
				})
			})
		}
	}
	wg.Wait()
	took := time.Since(begin)
	for range cap(errs) {
		if err := <-errs; err != nil {
			return 0, err
		}
	}
	return w.figure(requests.Load(), took), nil
}

// noMore ends a connection's loop instead of an offset.
const noMore = -1

// loopConn keeps depth requests outstanding on a connection, counts them, and ends when next has no more.
func loopConn(format wireFormat, f *file, w workload, depth int, requests *atomic.Int64, next func() int64) error {
	nc, err := net.Dial("tcp", f.addr.String())
	if err != nil {
		return err
	}
	defer nc.Close()
	in := bufio.NewReaderSize(nc, 8<<10)
	buf := make([]byte, w.size)
	var head []byte
	outstanding := 0
	send := func() error {
		off := next()
		if off == noMore {
			return nil
		}
		outstanding++
		head = format.request(head[:0], f, w, off)
		vec := net.Buffers{head}
		if w.write {
			vec = append(vec, buf)
		}
		_, err := vec.WriteTo(nc)
		return err
	}
	for range depth {
		if err := send(); err != nil {
			return err
		}
	}
	for outstanding > 0 {
		if err := format.reply(in, w, buf); err != nil {
			return err
		}
		outstanding--
		requests.Add(1)
		if err := send(); err != nil {
			return err
		}
	}
	return nil
}

// best runs the loop whose number of connections and depth are the best ones tried.
func best(format wireFormat, files []file, w workload, tries ...[2]int) (float64, error) {
	if turns != nil {
		return 0, nil // a baseline
	}
	return bestOf(func(conns, depth int, long time.Duration) (float64, error) {
		return loop(format, files, w, conns, depth, long)
	}, tries)
}

func bestOf(run func(conns, depth int, long time.Duration) (float64, error), tries [][2]int) (float64, error) {
	var choice [2]int
	var most float64
	for _, t := range tries {
		v, err := run(t[0], t[1], sample/5)
		if err != nil {
			return 0, err
		}
		if v > most {
			most, choice = v, t
		}
	}
	return run(choice[0], choice[1], sample)
}

// dirty writes to every page.
func dirty(b []byte) {
	for i := 0; i < len(b); i += iobuf.PageSize {
		b[i] = byte(i / iobuf.PageSize)
	}
}

// dialer makes the target of a data server.
type dialer func(addr netip.AddrPort) (dataplane.Target, error)

// byRPC makes targets with so many connections.
func byRPC(conns int) dialer {
	return func(addr netip.AddrPort) (dataplane.Target, error) {
		return nfs3.New(nfs3.Config{Name: addr.String(), Addrs: []netip.AddrPort{addr}, Connections: conns})
	}
}

// newPlane returns a data plane and a file whose columns are files.
func newPlane(files []file, dial dialer) (*dataplane.Plane, *layout.Segment, error) {
	devices := map[layout.DeviceID]netip.AddrPort{}
	var mirror layout.Mirror
	for i, f := range files {
		id := layout.DeviceID{byte(i + 1)}
		devices[id] = f.addr
		mirror.Servers = append(mirror.Servers, layout.DataFile{Device: id, Handles: [][]byte{f.handle}, Cred: f.cred})
	}
	p, err := dataplane.New(dataplane.Config{Dial: func(id layout.DeviceID) (dataplane.Target, error) { return dial(devices[id]) }})
	seg := &layout.Segment{Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW, StripeUnit: unit, Mirrors: []layout.Mirror{mirror}}
	return p, seg, err
}

// plane drives the data plane, without FUSE, with depth requests outstanding; files are the columns of a striped file. What is
// written is in the plane's memory, as with the device loop: each time in another buffer, of which every page was written to.
func plane(files []file, w workload, conns, depth int, long time.Duration) (float64, error) {
	return planeBy(byRPC(conns), files, w, depth, long)
}

func planeBy(dial dialer, files []file, w workload, depth int, long time.Duration) (float64, error) {
	return inTurns(func(t *turn) (float64, float64, time.Duration, error) {
		requests, took, err := planeOnce(t, dial, files, w, depth, long)
		return w.figure(requests, took), float64(requests), took, err
	})
}

func planeOnce(t *turn, dial dialer, files []file, w workload, depth int, long time.Duration) (done int64, took time.Duration, err error) {
	p, seg, err := newPlane(files, dial)
	if err != nil {
		return 0, 0, err
	}
	defer p.Close()
	pf := p.NewFile()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var committers sync.WaitGroup
	committers.Go(func() { // commits like a mount's; ends with ctx
		for {
			select {
			case <-p.Pressure():
				pf.Commit(ctx) // an error comes again at the end
			case <-ctx.Done():
				return
			}
		}
	})
	if w.write { // so that it is memory, as that of the loops, and not yet to become such
		var used []*iobuf.Buf
		for range p.RetainLimit() / 2 / int64(w.size) {
			b := p.Buffer(w.size)
			dirty(b.Bytes())
			used = append(used, b)
		}
		for _, b := range used {
			b.Release()
		}
	}
	var requests atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, depth)
	all := &offsets{workload: w}
	if err := t.begin(); err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	for range depth {
		wg.Add(1)
		buf := make([]byte, w.size)
		r := &dataplane.Read{Segment: seg, Buf: buf}
		wr := &dataplane.Write{Segment: seg}
		// A request may end before its start returns: then the next one is started by the loop that started it.
		const idle, starting, under, early = 0, 1, 2, 3
		var state atomic.Int32
		start := func() {
			for state.Store(starting); ; state.Store(starting) {
				if w.write {
					wr.Off, wr.Data, wr.Buf = all.take(), buf, p.Buffer(w.size)
					if wr.Buf != nil {
						wr.Data = wr.Buf.Bytes()
					}
					dirty(wr.Data)
					pf.StartWrite(wr)
				} else {
					r.Off = all.take()
					pf.StartRead(r)
				}
				p.Flush()
				if state.CompareAndSwap(starting, under) || state.CompareAndSwap(idle, idle) {
					return
				}
			}
		}
		ended := func(err error) { // starts the next one, as the loop does
			if wr.Buf != nil {
				wr.Buf.Release()
			}
			switch {
			case err != nil:
				errs <- err
			case time.Since(begin) > long:
				requests.Add(1)
			default:
				requests.Add(1)
				if !state.CompareAndSwap(starting, early) {
					start()
				}
				return
			}
			state.Store(idle)
			wg.Done()
		}
		r.Done, wr.Done = func(_ int, err error) { ended(err) }, ended
		start()
	}
	wg.Wait()
	took = time.Since(begin)
	cancel()
	committers.Wait()
	if err := pf.Commit(context.Background()); err != nil {
		return 0, 0, err
	}
	select {
	case err := <-errs:
		return 0, 0, err
	default:
		return requests.Load(), took, nil
	}
}

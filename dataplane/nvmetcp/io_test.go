package nvmetcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// TestData has reads and writes of all sizes, many at once, by every way that data can go, and compares with what should be there.
func TestData(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*peer, *Config)
	}{
		{"plain", func(*peer, *Config) {}},
		{"digests", func(p *peer, c *Config) { c.HeaderDigest, c.DataDigest = true, true }},
		{"header digest", func(p *peer, c *Config) { c.HeaderDigest = true }},
		{"data digest, padding", func(p *peer, c *Config) { c.DataDigest, p.align, p.resp.Align = true, 15, 3 }},
		{"pieces", func(p *peer, c *Config) { p.chop = true }},
		{"pieces, digests, padding", func(p *peer, c *Config) {
			c.HeaderDigest, c.DataDigest, p.align, p.resp.Align = true, true, 31, 31
			p.chop = true
		}},
		{"small MAXH2CDATA, nothing in capsules", func(p *peer, c *Config) { p.resp.MaxH2CData, p.inCaps = 4096, 0 }},
		{"many R2Ts, data in parts", func(p *peer, c *Config) {
			p.inCaps = 4096
			manyParts(p)
		}},
		{"many R2Ts, data in parts, digests", func(p *peer, c *Config) {
			c.HeaderDigest, c.DataDigest, c.Queues = true, true, 3
			manyParts(p)
		}},
		{"short queues", func(p *peer, c *Config) { c.QueueSize, c.Queues = 2, 3 }},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPeer(t)
			c := p.host(func(cfg *Config) { test.change(p, cfg) })
			seed := rand.Uint64()
			t.Logf("seed %#x", seed)
			rnd := rand.New(rand.NewPCG(seed, 0))
			model := make([]byte, peerSize)
			for range 4 {
				batch(t, c, rnd, wire.OpWrite, func(off int, b []byte) {
					copy(b, pattern(rnd.Uint64(), len(b)))
					copy(model[off:], b)
				}, nil)
				batch(t, c, rnd, wire.OpRead, nil, func(off int, b []byte) {
					if !bytes.Equal(b, model[off:][:len(b)]) {
						t.Errorf("%d bytes at %d are wrong", len(b), off)
					}
				})
			}
			if s := c.Stats(); s.State != StateLive || s.Losses != 0 || s.BadDigests != 0 || s.Outstanding != 0 || s.Bytes != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestAnswersTogether: what Done starts for answers that came together goes out together, behind the last of them.
func TestAnswersTogether(t *testing.T) {
	const depth = 8
	p := newPeer(t)
	var first, second []wire.Command // that arrived, in two rounds
	sent := make(chan struct{})      // closed when nobody sends the first round any more, who would send the second too
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(first) < depth {
			if first = append(first, cmd); len(first) == depth {
				<-sent
				var b []byte
				for i := range first {
					r := wire.CapsuleResp{Completion: wire.Completion{CID: first[i].CID, SQHead: uint16(i)}}
					b = r.Append(b, pc.send)
				}
				pc.raw(b)
			}
			return true
		}
		second = append(second, cmd)
		return false
	}
	c := p.host(nil)
	q := c.live.Load().io[0]
	var wg sync.WaitGroup
	var written []uint64
	for range depth {
		wg.Add(1)
		again := false
		c.Start(&Command{Op: wire.OpFlush, NSID: 1, Done: func(cmd *Command) {
			if again {
				wg.Done()
				return
			}
			again = true
			c.Start(cmd)
			c.Flush()
			written = append(written, q.out.pos.Load())
		}})
	}
	c.Flush()
	close(sent)
	wait(t, &wg)
	for i, pos := range written[:depth-1] {
		if pos != written[0] {
			t.Errorf("written before Done %d: %d bytes, want %d", i, pos, written[0])
		}
	}
	if got := int(written[depth-1] - written[0]); got != depth*wire.CapsuleCmdSize {
		t.Errorf("behind the last Done %d bytes are written, want %d", got, depth*wire.CapsuleCmdSize)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(second) != depth {
		t.Errorf("%d commands", len(second))
	}
}

// batch starts commands for pieces of the namespace that do not overlap, and waits for them.
func batch(t *testing.T, c *Controller, rnd *rand.Rand, op wire.Opcode, before, after func(off int, b []byte)) {
	t.Helper()
	var wg sync.WaitGroup
	var cmds []*Command
	for off := 0; off < peerSize; {
		n := 512 * (1 + rnd.IntN(16))
		if rnd.IntN(4) == 0 {
			n = 512 * (1 + rnd.IntN(2048))
		}
		n = min(n, peerSize-off)
		if rnd.IntN(3) > 0 {
			cmd := readCommand(uint64(off/512), n)
			cmd.Op = op
			cmd.Done = func(*Command) { wg.Done() }
			if before != nil {
				before(off, cmd.Data)
			}
			wg.Add(1)
			c.Start(cmd)
			if rnd.IntN(5) == 0 {
				c.Flush()
			}
			cmds = append(cmds, cmd)
		}
		off += n
	}
	c.Flush()
	wait(t, &wg)
	for _, cmd := range cmds {
		if cmd.Err != nil {
			t.Fatal(cmd.Err)
		}
		if after != nil {
			after(int(cmd.SLBA*512), cmd.Data)
		}
	}
}

func wait(t testing.TB, wg *sync.WaitGroup) {
	t.Helper()
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(60 * time.Second):
		t.Fatal("commands do not end")
	}
}

// manyParts makes the peer ask for writes by as many R2Ts at once as it may, and send what is read in parts, those of
// several commands mixed, some with SUCCESS and some without.
func manyParts(p *peer) {
	const part = 24 << 10
	type reading struct {
		cmd wire.Command
		off int
	}
	var mu sync.Mutex
	held := map[*peerConn][]*reading{}
	asked := map[*peerConn]map[uint16]int{}
	p.io = func(pc *peerConn, cmd wire.Command, data []byte) bool {
		switch {
		case cmd.Opcode == wire.OpRead:
			mu.Lock()
			defer mu.Unlock()
			held[pc] = append(held[pc], &reading{cmd: cmd})
			// With others there, or nothing more to come soon, a part of each in turn.
			for len(held[pc]) > 3 || len(held[pc]) > 0 && cmd.CID&1 == 0 {
				for i := 0; i < len(held[pc]); i++ {
					r := held[pc][i]
					b := pc.at(&r.cmd)[r.off:]
					n := min(len(b), part)
					last := n == len(b)
					success := last && r.cmd.CID&2 == 0
					p.dmu.Lock() // the host may have let go of the read, and be writing there
					pc.data(wire.C2HData{CID: r.cmd.CID, Offset: uint32(r.off), Last: last, Success: success}, b[:n])
					p.dmu.Unlock()
					r.off += n
					if !last {
						continue
					}
					if !success {
						pc.answer(wire.Completion{CID: r.cmd.CID, More: true})
					}
					held[pc] = append(held[pc][:i], held[pc][i+1:]...)
					i--
				}
			}
			if cmd.CID&1 != 0 {
				// So that none is left over.
				go func() {
					time.Sleep(5 * time.Millisecond)
					mu.Lock()
					defer mu.Unlock()
					for _, r := range held[pc] {
						p.dmu.Lock()
						pc.data(wire.C2HData{CID: r.cmd.CID, Offset: uint32(r.off), Last: true, Success: true}, pc.at(&r.cmd)[r.off:])
						p.dmu.Unlock()
					}
					held[pc] = nil
				}()
			}
			return true
		case cmd.Opcode == wire.OpWrite && len(data) == 0:
			mu.Lock()
			defer mu.Unlock()
			pc.writes[cmd.CID] = &peerWrite{cmd: cmd, buf: make([]byte, cmd.SGL.Length)}
			if asked[pc] == nil {
				asked[pc] = map[uint16]int{}
			}
			off := 0
			for i := 0; i < maxR2T && off < int(cmd.SGL.Length); i++ {
				n := min(part, int(cmd.SGL.Length)-off)
				pc.r2t(wire.R2T{CID: cmd.CID, Tag: uint16(i * 0x5555), Offset: uint32(off), Length: uint32(n)})
				off += n
			}
			asked[pc][cmd.CID] = off
			return true
		}
		return false
	}
	p.h2c = func(pc *peerConn, d wire.H2CData, data []byte) bool {
		mu.Lock()
		if w := pc.writes[d.CID]; d.Last && w != nil {
			if off := asked[pc][d.CID]; off < len(w.buf) {
				n := min(part, len(w.buf)-off)
				pc.r2t(wire.R2T{CID: d.CID, Tag: d.Tag, Offset: uint32(off), Length: uint32(n)})
				asked[pc][d.CID] = off + n
			}
		}
		mu.Unlock()
		return false
	}
}

// TestAllocations has no allocation for a command once the Controller is warm.
func TestAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	p := newPeer(t)
	c := p.host(nil)
	done := make(chan error, 64)
	cmds := make([]*Command, 32)
	for i := range cmds {
		cmds[i] = readCommand(uint64(i*8), 4096)
		if i%2 == 1 {
			cmds[i].Op = wire.OpWrite
		}
		cmds[i].Done = func(cmd *Command) { done <- cmd.Err }
	}
	round := func() {
		for _, cmd := range cmds {
			c.Start(cmd)
		}
		c.Flush()
		for range cmds {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 100 {
		round()
	}
	if n := testing.AllocsPerRun(500, round); n >= 1 {
		t.Errorf("%v allocations for %d commands", n, len(cmds))
	}
}

// TestQueueChoice sends what is small together and spreads what is large.
func TestQueueChoice(t *testing.T) {
	p := newPeer(t)
	var mu sync.Mutex
	seen := map[uint16]int{}
	release := make(chan struct{})
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		mu.Lock()
		seen[pc.qid]++
		mu.Unlock()
		go func() {
			<-release
			pc.ioCommand(cmd, nil)
		}()
		return true
	}
	c := p.host(func(cfg *Config) { cfg.Queues = 4 })
	var wg sync.WaitGroup
	start := func(cmd *Command, n int) {
		for range n {
			cmd := &Command{Op: cmd.Op, NSID: 1, Blocks: cmd.Blocks, Data: make([]byte, len(cmd.Data)), Done: func(cmd *Command) { wg.Done() }}
			wg.Add(1)
			c.Start(cmd)
		}
		c.Flush()
		waittest.Until(t, "all arrived", func() bool {
			mu.Lock()
			defer mu.Unlock()
			sum := 0
			for _, n := range seen {
				sum += n
			}
			return sum == n
		})
		mu.Lock()
		defer mu.Unlock()
		t.Log(seen)
	}
	start(readCommand(0, 4096), 6)
	if len(seen) != 1 {
		t.Errorf("6 small reads went to %d queues", len(seen))
	}
	close(release)
	wait(t, &wg)
	clear(seen)
	release = make(chan struct{})
	start(readCommand(0, 256<<10), 8)
	for q, n := range seen {
		if n != 2 || len(seen) != 4 {
			t.Errorf("queue %d got %d of 8 large reads", q, n)
		}
	}
	close(release)
	wait(t, &wg)
}

// TestDepth never has more commands in flight than the queue, or MAXCMD, allows.
func TestDepth(t *testing.T) {
	for _, test := range []struct {
		size, mqes int
		maxcmd     uint16
		want       int
	}{{8, 128, 0, 7}, {128, 16, 0, 15}, {128, 128, 5, 5}, {128, 2, 0, 1}, {128, 128, 1, 1}} {
		t.Run(fmt.Sprint(test), func(t *testing.T) {
			p := newPeer(t)
			p.caps.MaxQueueSize, p.ctrl.MAXCMD = test.mqes, test.maxcmd
			var mu sync.Mutex
			now, most := 0, 0
			p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
				mu.Lock()
				now++
				most = max(most, now)
				mu.Unlock()
				go func() {
					time.Sleep(time.Millisecond)
					mu.Lock()
					now--
					mu.Unlock()
					pc.ioCommand(cmd, nil)
				}()
				return true
			}
			c := p.host(func(cfg *Config) { cfg.QueueSize = test.size })
			if n := c.Limits().Depth; n != test.want {
				t.Fatalf("depth is %d, want %d", n, test.want)
			}
			if n := p.connectArg[1].QueueSize; n != test.want+1 {
				t.Errorf("Connect asks for a queue of %d", n)
			}
			var wg sync.WaitGroup
			for range 100 {
				cmd := readCommand(0, 512)
				cmd.Done = func(cmd *Command) {
					if cmd.Err != nil {
						t.Error(cmd.Err)
					}
					wg.Done()
				}
				wg.Add(1)
				c.Start(cmd)
			}
			c.Flush()
			wait(t, &wg)
			mu.Lock()
			defer mu.Unlock()
			if most != test.want {
				t.Errorf("%d commands were in flight, want %d", most, test.want)
			}
		})
	}
}

// TestDetach takes the memory away from commands in every state, and watches it.
func TestDetach(t *testing.T) {
	t.Run("read", func(t *testing.T) {
		p := newPeer(t)
		arrived, goOn := make(chan struct{}, 10), make(chan struct{})
		p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
			if cmd.Opcode != wire.OpRead {
				return false
			}
			b := pattern(1, int(cmd.SGL.Length))
			d := wire.C2HData{CID: cmd.CID, Length: cmd.SGL.Length, Last: true, Success: true}
			pc.raw(append(d.Append(nil, pc.send), b[:1024]...)) // a PDU in two parts
			arrived <- struct{}{}
			<-goOn
			pc.raw(b[1024:])
			return true
		}
		c := p.host(func(cfg *Config) { cfg.QueueSize = 2 })
		done := make(chan error, 10)
		first, second := readCommand(0, 256<<10), readCommand(0, 4096) // the second has to wait for the slot
		first.Done = func(cmd *Command) { done <- cmd.Err }
		second.Done = first.Done
		c.Start(first)
		c.Start(second)
		c.Flush()
		<-arrived
		q := c.live.Load().io[0]
		waittest.Until(t, "receiving", func() bool {
			q.mu.Lock()
			defer q.mu.Unlock()
			return q.current != nil
		})
		for _, cmd := range []*Command{second, first} {
			c.Detach(cmd)
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Fatalf("ended with %v", err)
			}
			clear(cmd.Data)
		}
		close(goOn)
		third := readCommand(0, 4096)
		if err := do(t, c, third); err != nil || !bytes.Equal(third.Data, pattern(1, 4096)) {
			t.Errorf("the next read: %v", err)
		}
		for _, cmd := range []*Command{first, second} {
			if !bytes.Equal(cmd.Data, make([]byte, len(cmd.Data))) {
				t.Error("the memory was written to after Detach")
			}
		}
		if s := c.Stats(); s.Losses != 0 || s.Outstanding != 0 {
			t.Errorf("%+v", s)
		}
	})
	for _, digests := range []bool{false, true} {
		t.Run(fmt.Sprintf("write, digests %v", digests), func(t *testing.T) {
			p := newPeer(t)
			p.inCaps = 4096
			held := make(chan struct{})
			p.io = func(pc *peerConn, cmd wire.Command, data []byte) bool {
				<-held // and reads nothing: what is sent fills the socket's buffers
				return false
			}
			c := p.host(func(cfg *Config) { cfg.QueueSize, cfg.DataDigest = 40, digests })
			done := make(chan error, 100)
			var cmds []*Command
			want := map[int][]byte{}
			for i := range 60 {
				n := 4096 // in the capsule
				if i%10 == 9 {
					n = 1 << 20
				}
				slba := i * 8
				if n > 4096 {
					slba = 2048 * (1 + i/10)
				}
				cmd := writeCommand(uint64(slba), pattern(uint64(i), n))
				cmd.Done = func(cmd *Command) { done <- cmd.Err }
				want[slba] = bytes.Clone(cmd.Data)
				cmds = append(cmds, cmd)
				c.Start(cmd)
			}
			c.Flush()
			for _, cmd := range cmds {
				c.Detach(cmd)
				clear(cmd.Data)
			}
			close(held)
			for range cmds {
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			}
			p.dmu.Lock()
			defer p.dmu.Unlock()
			for slba, b := range want {
				if !bytes.Equal(p.disk[slba*512:][:len(b)], b) {
					t.Errorf("what was written to block %d is not what was to be", slba)
				}
			}
		})
	}
	t.Run("ended", func(t *testing.T) {
		c := newPeer(t).host(nil)
		cmd := readCommand(0, 512)
		if err := do(t, c, cmd); err != nil {
			t.Fatal(err)
		}
		c.Detach(cmd)
		c.Detach(new(Command))
	})
}

// TestDetachUnderLoad detaches at any moment while data comes and goes.
func TestDetachUnderLoad(t *testing.T) {
	p := newPeer(t)
	manyParts(p)
	c := p.host(func(cfg *Config) { cfg.Queues, cfg.DataDigest = 2, true })
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			base := uint64(i) * 4096
			for range 30 {
				data := pattern(rnd.Uint64(), 256<<10)
				done := make(chan error, 1)
				w := writeCommand(base, data)
				w.Done = func(cmd *Command) { done <- cmd.Err }
				want := bytes.Clone(data)
				c.Start(w)
				c.Flush()
				time.Sleep(time.Duration(rnd.IntN(1000)) * time.Microsecond)
				c.Detach(w)
				clear(data)
				if err := <-done; err != nil {
					t.Error(err)
					return
				}
				r := readCommand(base, 256<<10)
				r.Done = w.Done
				c.Start(r)
				c.Flush()
				if rnd.IntN(2) == 0 {
					time.Sleep(time.Duration(rnd.IntN(1000)) * time.Microsecond)
					c.Detach(r)
				}
				switch err := <-done; {
				case errors.Is(err, context.Canceled):
				case err != nil:
					t.Error(err)
					return
				case !bytes.Equal(r.Data, want):
					t.Error("what was written is not what was to be")
				}
			}
		})
	}
	wait(t, &wg)
}

// TestRequests refuses what cannot be right without asking the controller.
func TestRequests(t *testing.T) {
	c := newPeer(t).host(nil)
	for name, cmd := range map[string]*Command{
		"too long":      {Op: wire.OpRead, NSID: 1, Blocks: 4096, Data: make([]byte, 2<<20)},
		"no blocks":     {Op: wire.OpRead, NSID: 1, Data: make([]byte, 512)},
		"many blocks":   {Op: wire.OpWriteZeroes, NSID: 1, Blocks: 65537},
		"no data":       {Op: wire.OpWrite, NSID: 1, Blocks: 1},
		"odd data":      {Op: wire.OpWrite, NSID: 1, Blocks: 1, Data: make([]byte, 510)},
		"parts":         {Op: wire.OpRead, NSID: 1, Blocks: 3, Data: make([]byte, 512)},
		"end":           {Op: wire.OpRead, NSID: 1, SLBA: 1<<64 - 1, Blocks: 2, Data: make([]byte, 1024)},
		"data of Flush": {Op: wire.OpFlush, NSID: 1, Data: make([]byte, 512)},
		"other":         {Op: wire.OpReservationAcquire, NSID: 1},
	} {
		var bad *RequestError
		if err := do(t, c, cmd); !errors.As(err, &bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.Admin(t.Context(), wire.KeepAlive(), make([]byte, 2<<20)); err == nil {
		t.Error("2 MiB for an admin command")
	}
}

// TestSpan cuts at what the controller takes and the namespace wants.
func TestSpan(t *testing.T) {
	l := Limits{MaxTransfer: 128 << 10, MaxBlocks: 65536}
	for _, test := range []struct {
		shift   uint8
		noiob   uint16
		slba, n uint64
		want    uint32
	}{
		{9, 0, 5, 1000, 256}, {9, 0, 5, 10, 10}, {12, 0, 0, 1000, 32}, {9, 64, 5, 1000, 59}, {9, 64, 64, 1000, 64}, {9, 64, 63, 2, 1}, {16, 0, 0, 9, 2},
	} {
		ns := wire.Namespace{BlockShift: test.shift, NOIOB: test.noiob}
		if got := l.Span(&ns, test.slba, test.n); got != test.want {
			t.Errorf("%+v: %d", test, got)
		}
	}
}

package nvmetarget

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// MaxH2CData has the target accept n bytes per H2CData, a multiple of 4. Less than 4096 breaks the protocol.
func MaxH2CData(n uint32) Rule {
	return func(c *Conn, p *PDU, send func(*PDU)) {
		if p.Type == wire.PDUICResp {
			le.PutUint32(p.Head[12:], n)
			c.maxData = n
		}
		send(p)
	}
}

// Align has the target want data at multiples of (cpda+1)*4 bytes. More than 31 breaks the protocol.
func Align(cpda uint8) Rule {
	return func(c *Conn, p *PDU, send func(*PDU)) {
		if p.Type == wire.PDUICResp {
			p.Head[10] = cpda
			if cpda <= wire.MaxAlign {
				c.align = cpda
			}
		}
		send(p)
	}
}

// SplitR2T has the target ask for data in pieces of at most n bytes, one after another.
func SplitR2T(n uint32) Rule {
	return func(c *Conn, p *PDU, send func(*PDU)) {
		if p.Type != wire.PDUR2T || p.Length() <= n {
			send(p)
			return
		}
		r := &request{r2t: p, tag: le.Uint16(p.Head[10:]), next: p.Offset(), end: p.Offset() + p.Length(), piece: n, send: send}
		c.cut[p.CID()] = r
		r.ask()
	}
}

// SplitData sends the data that commands read in PDUs of at most n bytes. With mix those of commands that are answered
// together, that is within some milliseconds, take turns.
func SplitData(n uint32, mix bool) Rule {
	var mu sync.Mutex
	held := map[*Conn]map[uint16][]*PDU{}
	return func(c *Conn, p *PDU, send func(*PDU)) {
		var pieces []*PDU
		switch {
		case p.Raw != nil || p.Type != wire.PDUC2HData && p.Type != wire.PDUCapsuleResp:
			send(p)
			return
		case p.Type == wire.PDUCapsuleResp:
			pieces = []*PDU{p}
		}
		for off := uint32(0); p.Type == wire.PDUC2HData && off < uint32(len(p.Data)); off += n {
			q := p.Clone()
			q.Data = p.Data[off:min(off+n, uint32(len(p.Data)))]
			q.SetRange(p.Offset()+off, uint32(len(q.Data)))
			if int(off)+len(q.Data) < len(p.Data) {
				q.Flags &^= wire.FlagLast | wire.FlagSuccess
			}
			pieces = append(pieces, q)
		}
		if !mix {
			for _, q := range pieces {
				send(q)
			}
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if held[c] == nil {
			held[c] = map[uint16][]*PDU{}
			time.AfterFunc(3*time.Millisecond, func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				mu.Lock()
				lists := held[c]
				delete(held, c)
				mu.Unlock()
				for len(lists) > 0 {
					for cid, list := range lists {
						send(list[0])
						if lists[cid] = list[1:]; len(list) == 1 {
							delete(lists, cid)
						}
					}
				}
			})
		}
		held[c][p.CID()] = append(held[c][p.CID()], pieces...)
	}
}

// Delay sends PDUs later, so that others overtake them: the data and the completion of a command stay in order.
func Delay(d func() time.Duration) Rule {
	type key struct {
		c   *Conn
		cid uint16
	}
	var mu sync.Mutex
	waiting := map[key][]*PDU{}
	return func(c *Conn, p *PDU, send func(*PDU)) {
		if p.Raw != nil || p.Type != wire.PDUCapsuleResp && p.Type != wire.PDUC2HData {
			send(p)
			return
		}
		k := key{c, p.CID()}
		mu.Lock()
		waiting[k] = append(waiting[k], p)
		mu.Unlock()
		time.AfterFunc(d(), func() { // each sends the first of the command, whichever timer it is
			c.mu.Lock()
			defer c.mu.Unlock()
			mu.Lock()
			first := waiting[k][0]
			if waiting[k] = waiting[k][1:]; len(waiting[k]) == 0 {
				delete(waiting, k)
			}
			mu.Unlock()
			send(first)
		})
	}
}

// When uses a rule for the PDUs for which is says so, and passes the others on.
func When(is func(c *Conn, p *PDU) bool, do Rule) Rule {
	return func(c *Conn, p *PDU, send func(*PDU)) {
		if p.Raw == nil && is(c, p) {
			do(c, p, send)
		} else {
			send(p)
		}
	}
}

// Nth uses a rule for one PDU, the nth (from 1) of a type on the I/O queues, and passes the others on.
func Nth(n int64, t wire.PDUType, do Rule) Rule {
	var seen atomic.Int64
	return When(func(c *Conn, p *PDU) bool { return c.qid != 0 && p.Type == t && seen.Add(1) == n }, do)
}

// Drop sends nothing.
func Drop(*Conn, *PDU, func(*PDU)) {}

// Twice sends the PDU twice.
func Twice(_ *Conn, p *PDU, send func(*PDU)) {
	send(p.Clone())
	send(p)
}

// Cut resets the connection instead.
func Cut(c *Conn, _ *PDU, _ func(*PDU)) { c.Cut() }

// CutInside resets the connection when half of the PDU was sent.
func CutInside(c *Conn, p *PDU, send func(*PDU)) {
	b := p.encode(c.toHost)
	send(&PDU{Raw: b[:len(b)/2], CutAfter: true})
}

// SpoilHeaderDigest sends the PDU with a wrong header digest, SpoilDataDigest with a wrong data digest. There have to be digests.
func SpoilHeaderDigest(_ *Conn, p *PDU, send func(*PDU)) {
	p.SpoilHeader = true
	send(p)
}

// SpoilDataDigest is that of SpoilHeaderDigest's comment.
func SpoilDataDigest(_ *Conn, p *PDU, send func(*PDU)) {
	p.SpoilData = true
	send(p)
}

// UnknownCID sends a completion of a command that there is not before the PDU.
func UnknownCID(c *Conn, p *PDU, send func(*PDU)) {
	cid := uint16(0xFFFE)
	for ; ; cid-- {
		if _, ok := c.commands[cid]; !ok {
			break
		}
	}
	resp := wire.CapsuleResp{Completion: wire.Completion{SQID: c.qid, CID: cid}}
	send(&PDU{Type: wire.PDUCapsuleResp, Head: resp.Append(nil, wire.Framing{}), headerDigest: true})
	send(p)
}

// PLen has the header say that the PDU has n bytes.
func PLen(n uint32) Rule {
	return func(_ *Conn, p *PDU, send func(*PDU)) {
		p.PLen = n
		send(p)
	}
}

// Flags has the PDU sent with other flags.
func Flags(set, clear wire.Flags) Rule {
	return func(_ *Conn, p *PDU, send func(*PDU)) {
		p.Flags = p.Flags&^clear | set
		send(p)
	}
}

// Range has a C2HData or R2T speak of other bytes: its offset and length are moved. The data stays as it is.
func Range(offset, length int32) Rule {
	return func(_ *Conn, p *PDU, send func(*PDU)) {
		p.SetRange(p.Offset()+uint32(offset), p.Length()+uint32(length))
		send(p)
	}
}

// Ask sends an R2T for the command before the PDU.
func Ask(offset, length uint32) Rule {
	return func(_ *Conn, p *PDU, send func(*PDU)) {
		r := wire.R2T{CID: p.CID(), Tag: 77, Offset: offset, Length: length}
		send(&PDU{Type: wire.PDUR2T, Head: r.Append(nil, wire.Framing{}), headerDigest: true})
		send(p)
	}
}

// Bytes sends these instead of the PDU.
func Bytes(b []byte) Rule {
	return func(_ *Conn, _ *PDU, send func(*PDU)) { send(&PDU{Raw: b}) }
}

// Random sends n random bytes instead of the PDU.
func Random(n int, seed uint64) Rule {
	b := make([]byte, n)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return Bytes(b)
}

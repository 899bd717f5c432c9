package metaclient

import (
	"fmt"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// places is what the services have told about themselves: of which volume they are, and which of them has which shard. Every session
// of a Volume learns from its own and looks there for its service.
type places struct {
	given []string // Config.Addrs

	mu     sync.Mutex
	volume [16]byte     // zero: no service has told yet
	ring   metarpc.Ring // the newest; without Owners: none yet
	top    string       // what Welcome.Top said last
}

// known returns the ring; it has no Owners as long as no service has answered. What it holds is not to be changed.
func (p *places) known() metarpc.Ring {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ring
}

// volumeID is the volume's, zero if it is not known yet.
func (p *places) volumeID() [16]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.volume
}

// learn takes in what a service at addr has answered to a hello: of which volume it is, and, if it does not refuse us for another reason than that
// another one has the shard, where the shards are. The first one that tells so decides which volume is ours. With an error nothing was taken in,
// and nothing that the service has answered counts: it is not of this volume.
func (p *places) learn(addr string, w *metarpc.Welcome) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case w.Volume == [16]byte{}:
		return fmt.Errorf("%s does not say which file system it serves (%v %s)", addr, w.Status, w.Message)
	case p.volume != [16]byte{} && w.Volume != p.volume:
		return fmt.Errorf("%s serves another file system (volume %x) than the one mounted (%x)", addr, w.Volume, p.volume)
	case w.Status != metarpc.StatusOK && w.Status != metarpc.StatusMoved:
		return nil
	}
	shards, told := len(p.ring.Owners), len(w.Ring.Owners)
	if shards > 0 && told != shards {
		return fmt.Errorf("%s serves a volume of %d shards, which had %d when it was mounted: mount it again", addr, told, shards)
	}
	p.volume = w.Volume
	if w.Status == metarpc.StatusOK {
		p.top = w.Top
	}
	if shards == 0 || w.Ring.Epoch > p.ring.Epoch {
		p.ring = w.Ring
	}
	return nil
}

// next is where to look for the service of a shard: at the one that is said to have it, then where it was last, then at all others that
// were ever named, none of which may be in tried. It is empty if there is no more.
func (p *places) next(shard int, last string, tried map[string]bool) (addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []string
	if shard < len(p.ring.Owners) {
		if owner := p.ring.Owners[shard]; owner >= 0 {
			list = append(list, p.ring.Services[owner])
		}
	}
	if last != "" {
		list = append(list, last)
	}
	from := max(0, slices.Index(p.given, last))
	list = slices.Concat(list, p.given[from:], p.given[:from], p.ring.Services)
	for _, a := range list {
		if !tried[a] {
			return a
		}
	}
	return ""
}

// several reports whether there are services beside one.
func (p *places) several() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ring.Services) > 1
}

// first is a shard of each service that is said to have any.
func (p *places) first() (shards []int) {
	ring := p.known()
	seen := map[int]bool{}
	for shard, owner := range ring.Owners {
		if owner >= 0 && !seen[owner] {
			seen[owner] = true
			shards = append(shards, shard)
		}
	}
	return shards
}

package nvmeauth

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
)

// Config is what host and controller each know of one another.
type Config struct {
	HostNQN   string
	SubsysNQN string

	// HostSecret is what the host proves itself by.
	HostSecret Secret

	// ControllerSecret is what the controller proves itself by, zero if it has none. A host that has it insists on the proof. A
	// controller that has it gives the proof when it is asked for.
	ControllerSecret Secret

	// Hashes and Groups are what to use, the best first; nil: everything, in the order of Linux, but with a DH group rather than
	// without. The controller's order decides; the host refuses what is not in its list.
	Hashes []Hash
	Groups []Group
}

var (
	defaultHashes = []Hash{SHA256, SHA384, SHA512}
	defaultGroups = []Group{FFDHE2048, FFDHE3072, FFDHE4096, FFDHE6144, FFDHE8192, NoGroup}
)

const maxNQN = 223

// Validate tells what of c cannot work.
func (c *Config) Validate() error {
	for _, n := range []struct{ what, nqn string }{{"host", c.HostNQN}, {"subsystem", c.SubsysNQN}} {
		if n.nqn == "" || len(n.nqn) > maxNQN || strings.ContainsRune(n.nqn, 0) {
			return fmt.Errorf("NVMe authentication: the %s NQN %q must have 1 to %d bytes, none of them zero", n.what, n.nqn, maxNQN)
		}
	}
	if c.HostSecret.IsZero() {
		return fmt.Errorf("NVMe authentication: no secret for host %s at subsystem %s: configure it on both sides",
			c.HostNQN, c.SubsysNQN)
	}
	if !choice(c.Hashes, Hash.usable) {
		return fmt.Errorf("NVMe authentication: hashes %v: want some of %v", c.Hashes, defaultHashes)
	}
	if !choice(c.Groups, Group.usable) {
		return fmt.Errorf("NVMe authentication: DH groups %v: want some of %v", c.Groups, defaultGroups)
	}
	return nil
}

// choice is whether list is nil or fits a negotiate message.
func choice[T any](list []T, usable func(T) bool) bool {
	for _, v := range list {
		if !usable(v) {
			return false
		}
	}
	return list == nil || len(list) > 0 && len(list) <= maxIDs
}

// hostResponse is R1 of the package's comment, for the challenge C1.
func (c *Config) hostResponse(h Hash, challenge, ks []byte, seq uint32, tid uint16) []byte {
	return h.response(c.HostSecret.key(c.HostNQN), challenge, ks, seq, tid, "HostHost", c.HostNQN, c.SubsysNQN)
}

// controllerResponse is R2, for the challenge C2.
func (c *Config) controllerResponse(h Hash, challenge, ks []byte, seq uint32, tid uint16) []byte {
	return h.response(c.ControllerSecret.key(c.SubsysNQN), challenge, ks, seq, tid, "Controller", c.SubsysNQN, c.HostNQN)
}

func (c Config) withDefaults() Config {
	if c.Hashes == nil {
		c.Hashes = defaultHashes
	}
	if c.Groups == nil {
		c.Groups = defaultGroups
	}
	return c
}

// errOver is the answer to steps after the last.
var errOver = errors.New("NVMe authentication: the transaction is over; a further one needs a new Host or Controller")

// chance is what a transaction takes from outside. Tests put the bytes of a recorded one here.
type chance struct {
	random   func([]byte)
	sequence func() uint32
}

func newChance() chance {
	return chance{func(b []byte) { rand.Read(b) }, nextSequence}
}

var sequence struct {
	mu   sync.Mutex
	last uint32
}

// nextSequence is the sequence number of a challenge: the first is random, the others count on from it, and 0 is left out.
func nextSequence() uint32 {
	sequence.mu.Lock()
	defer sequence.mu.Unlock()
	if sequence.last == 0 {
		var b [4]byte
		rand.Read(b[:])
		sequence.last = binary.LittleEndian.Uint32(b[:])
	}
	sequence.last++
	if sequence.last == 0 {
		sequence.last = 1
	}
	return sequence.last
}

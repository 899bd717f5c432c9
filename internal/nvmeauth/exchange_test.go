package nvmeauth

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
)

const (
	hostNQN   = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000042"
	subsysNQN = "nqn.2024-01.weft.lab:s0"
)

// config makes both sides agree on one hash and one group.
func config(t testing.TB, h Hash, g Group, mutual bool) Config {
	t.Helper()
	cfg := Config{
		HostNQN: hostNQN, SubsysNQN: subsysNQN, HostSecret: parse(t, vectors[0].transforms), Hashes: []Hash{h}, Groups: []Group{g},
	}
	if mutual {
		cfg.ControllerSecret = parse(t, vectors[1].transforms)
	}
	return cfg
}

func pair(t testing.TB, host, controller Config) (*Host, *Controller) {
	t.Helper()
	h, err := NewHost(host, 0x1234)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewController(controller)
	if err != nil {
		t.Fatal(err)
	}
	return h, c
}

// outcome is how an exchange ended for both.
type outcome struct {
	hostDone, controllerDone bool
	hostErr, controllerErr   error
	messages                 [][]byte // as they were sent, the host's first
}

// exchange carries messages until neither side has one. change, if not nil, gives what arrives in place of message i.
func exchange(h *Host, c *Controller, change func(i int, b []byte) []byte) (o outcome) {
	carry := func(b []byte) []byte {
		o.messages = append(o.messages, b)
		if b = bytes.Clone(b); change != nil {
			b = change(len(o.messages)-1, b)
		}
		return b
	}
	var received []byte
	for {
		send, done, err := h.Step(received)
		o.hostDone, o.hostErr = done, err
		if send == nil {
			return o
		}
		send, ok, err := c.Step(carry(send))
		if !errors.Is(err, errOver) {
			o.controllerDone, o.controllerErr = o.controllerDone || ok, err
		}
		if o.hostDone || o.hostErr != nil || send == nil {
			return o
		}
		// As it arrives in a buffer that was made for more.
		received = append(carry(send), make([]byte, 100)...)
	}
}

// trial is an exchange between two new sides. Whoever is through with it must not go on.
func trial(t testing.TB, host, controller Config, change func(int, []byte) []byte) outcome {
	t.Helper()
	h, c := pair(t, host, controller)
	o := exchange(h, c, change)
	if o.hostErr != nil || o.hostDone {
		if _, _, err := h.Step(nil); !errors.Is(err, errOver) {
			t.Errorf("a step of the host after the last: %v", err)
		}
	}
	if o.controllerErr != nil || o.controllerDone {
		if _, _, err := c.Step(nil); !errors.Is(err, errOver) {
			t.Errorf("a step of the controller after the last: %v", err)
		}
	}
	return o
}

func reason(err error) Reason {
	var f *Failure
	if errors.As(err, &f) {
		return f.Reason
	}
	return 0
}

func TestExchange(t *testing.T) {
	for g := NoGroup; g.usable(); g++ {
		for h := SHA256; h.usable(); h++ {
			for _, mutual := range []bool{false, true} {
				if g > FFDHE4096 && (h == SHA384 || !mutual) {
					continue // the power takes long, and has nothing to do with the hash
				}
				cfg := config(t, h, g, mutual)
				o := trial(t, cfg, cfg, nil)
				if !o.hostDone || !o.controllerDone || o.hostErr != nil || o.controllerErr != nil {
					t.Errorf("%v, %v, mutual %v: %+v", h, g, mutual, o)
				}
				sizes := []int{72, 16 + h.size() + g.size(), 16 + 2*h.size() + g.size(), 16}
				if mutual {
					sizes[3] += h.size()
					sizes = append(sizes, 16)
				}
				var got []int
				for _, m := range o.messages {
					got = append(got, len(m))
				}
				if fmt.Sprint(got) != fmt.Sprint(sizes) {
					t.Errorf("%v, %v, mutual %v: messages of %v bytes, want %v", h, g, mutual, got, sizes)
				}
			}
		}
	}
}

// TestNegotiation: who decides, and what happens when there is nothing to agree on.
func TestNegotiation(t *testing.T) {
	base := config(t, SHA256, NoGroup, false)
	for _, tt := range []struct {
		hostHashes, controllerHashes []Hash
		hostGroups, controllerGroups []Group
		hash                         Hash
		group                        Group
		want                         Reason
	}{
		{nil, nil, nil, nil, SHA256, FFDHE2048, 0},
		{nil, nil, []Group{NoGroup}, nil, SHA256, NoGroup, 0},
		{[]Hash{SHA256, SHA512}, []Hash{SHA384, SHA512, SHA256}, nil, []Group{NoGroup}, SHA512, NoGroup, 0},
		{nil, nil, []Group{FFDHE2048, FFDHE3072}, []Group{NoGroup, FFDHE3072, FFDHE2048}, SHA256, FFDHE3072, 0},
		{[]Hash{SHA256}, []Hash{SHA384}, nil, nil, 0, 0, HashUnusable},
		{nil, nil, []Group{FFDHE3072}, []Group{NoGroup, FFDHE2048}, 0, 0, GroupUnusable},
	} {
		host, controller := base, base
		host.Hashes, host.Groups = tt.hostHashes, tt.hostGroups
		controller.Hashes, controller.Groups = tt.controllerHashes, tt.controllerGroups
		o := trial(t, host, controller, nil)
		if tt.want != 0 {
			if reason(o.controllerErr) != tt.want || reason(o.hostErr) != tt.want {
				t.Errorf("%+v: %v; %v", tt, o.controllerErr, o.hostErr)
			}
			continue
		}
		if m := o.messages[1]; !o.hostDone || !o.controllerDone || Hash(m[8]) != tt.hash || Group(m[9]) != tt.group {
			t.Errorf("%+v: chosen %v, %v: %+v", tt, Hash(m[8]), Group(m[9]), o)
		}
	}
}

// TestNotOffered has a controller, as Linux's, that takes what it likes.
func TestNotOffered(t *testing.T) {
	host, controller := config(t, SHA512, FFDHE2048, false), config(t, SHA512, FFDHE2048, false)
	controller.Groups = []Group{NoGroup}
	offer := func(i int, b []byte) []byte {
		if i == 0 {
			b[8+4+30] = uint8(NoGroup)
		}
		return b
	}
	if o := trial(t, host, controller, offer); reason(o.hostErr) != GroupUnusable || reason(o.controllerErr) != GroupUnusable {
		t.Errorf("a group that was not offered: %v; %v", o.hostErr, o.controllerErr)
	}
	controller.Groups, controller.Hashes = host.Groups, []Hash{SHA256}
	offer = func(i int, b []byte) []byte {
		if i == 0 {
			b[8+4] = uint8(SHA256)
		}
		return b
	}
	if o := trial(t, host, controller, offer); reason(o.hostErr) != HashUnusable || reason(o.controllerErr) != HashUnusable {
		t.Errorf("a hash that was not offered: %v; %v", o.hostErr, o.controllerErr)
	}
}

func TestWrongSecrets(t *testing.T) {
	for _, g := range []Group{NoGroup, FFDHE2048} {
		good := config(t, SHA256, g, true)
		for _, tt := range []struct {
			name             string
			change           func(*Config)
			host, controller Reason
			told             string // who hears of it from the other: "host", "controller"
		}{
			{"the host's", func(c *Config) { c.HostSecret = newSecret(SHA256) }, Failed, Failed, "host"},
			{"the host's, another transformation", func(c *Config) {
				c.HostSecret = makeSecret(SHA384, (*c.HostSecret.s).key)
			}, Failed, Failed, "host"},
			{"the host's, not transformed", func(c *Config) {
				c.HostSecret = makeSecret(NoHash, (*c.HostSecret.s).key)
			}, Failed, Failed, "host"},
			{"the controller's", func(c *Config) { c.ControllerSecret = newSecret(NoHash) }, Failed, Failed, "controller"},
			{"the host's for the controller's", func(c *Config) { c.ControllerSecret = c.HostSecret }, Failed, Failed, "controller"},
			{"host NQN", func(c *Config) { c.HostNQN += "x" }, Failed, Failed, "host"},
			{"subsystem NQN", func(c *Config) { c.SubsysNQN += "x" }, Failed, Failed, "host"},
		} {
			host := good
			tt.change(&host)
			o := trial(t, host, good, nil)
			if o.hostDone || o.controllerDone || reason(o.hostErr) != tt.host || reason(o.controllerErr) != tt.controller {
				t.Errorf("%v: %s: %+v", g, tt.name, o)
				continue
			}
			var h, c *Failure
			if errors.As(o.hostErr, &h); errors.As(o.controllerErr, &c) && (h.ByPeer != (tt.told == "host") || c.ByPeer == h.ByPeer) {
				t.Errorf("%v: %s: told by the peer: host %v, controller %v", g, tt.name, h.ByPeer, c.ByPeer)
			}
			for _, err := range []error{o.hostErr, o.controllerErr} {
				for _, want := range []string{subsysNQN, hostNQN, "compare"} {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%v: %s: %v: no %q in it", g, tt.name, err, want)
					}
				}
			}
		}

		// A proof that the controller cannot give.
		without := good
		without.ControllerSecret = Secret{}
		if o := trial(t, good, without, nil); o.hostDone || o.controllerDone || reason(o.hostErr) != Failed || reason(o.controllerErr) != Failed {
			t.Errorf("%v: a controller without a secret: %+v", g, o)
		}
		// One that nobody asks for.
		if o := trial(t, without, good, nil); !o.hostDone || !o.controllerDone {
			t.Errorf("%v: a controller that need not prove itself: %+v", g, o)
		}
	}
}

// reserved is what may be altered without anybody minding, per message of a mutual exchange with one hash and one group:
// reserved fields, and what is behind the end of the lists.
func reserved(i, at int) bool {
	if at == 2 || at == 3 {
		return true
	}
	switch i {
	case 0:
		return at == 9 || at > 12 && at < 42 || at > 42
	case 1:
		return at == 7
	case 2:
		return at == 7 || at == 9
	case 3:
		return at == 7 || at > 8 && at < 16
	}
	return at > 5
}

// TestAltered alters each byte of each message, in two ways: at least one side refuses, unless the byte has no meaning.
func TestAltered(t *testing.T) {
	for _, g := range []Group{NoGroup, FFDHE2048} {
		cfg := config(t, SHA256, g, true)
		good := trial(t, cfg, cfg, nil)
		if len(good.messages) != 5 {
			t.Fatalf("%+v", good)
		}
		for i, m := range good.messages {
			for at := range m {
				for _, flip := range []byte{1, 0xFF} {
					o := trial(t, cfg, cfg, func(n int, b []byte) []byte {
						if n == i {
							b[at] ^= flip
						}
						return b
					})
					both := o.hostDone && o.controllerDone && o.hostErr == nil && o.controllerErr == nil
					if both != reserved(i, at) {
						t.Errorf("%v: message %d, byte %d altered by %#x: %+v", g, i, at, flip, o)
					}
				}
			}
		}
	}
}

// TestCutAndExtended: a message that is too short is refused, and one that is too long if it is the host's.
func TestCutAndExtended(t *testing.T) {
	cfg := config(t, SHA256, FFDHE2048, true)
	good := trial(t, cfg, cfg, nil)
	for i, m := range good.messages {
		for n := range m {
			h, c := pair(t, cfg, cfg)
			o := exchange(h, c, func(at int, b []byte) []byte {
				if at == i {
					b = b[:n]
				}
				return b
			})
			// What exchange puts behind the controller's message is the rest of it when that is zeros.
			if o.hostDone && o.controllerDone && !bytes.Equal(m[n:], make([]byte, len(m)-n)) {
				t.Errorf("message %d with %d of its %d bytes: %+v", i, n, len(m), o)
			}
		}
		o := trial(t, cfg, cfg, func(at int, b []byte) []byte {
			if at == i {
				b = append(b, 0)
			}
			return b
		})
		if fine := o.hostDone && o.controllerDone; fine != (i == 1 || i == 3) {
			t.Errorf("message %d with a byte more: %+v", i, o)
		}
	}
}

// TestReplay gives one side all messages of an earlier exchange of the same host, controller and transaction number.
func TestReplay(t *testing.T) {
	for _, g := range []Group{NoGroup, FFDHE2048} {
		for _, mutual := range []bool{false, true} {
			cfg := config(t, SHA256, g, mutual)
			old := trial(t, cfg, cfg, nil)
			h, c := pair(t, cfg, cfg)
			if _, _, err := c.Step(old.messages[0]); err != nil {
				t.Fatal(err)
			}
			if _, done, err := c.Step(old.messages[2]); done || reason(err) != Failed {
				t.Errorf("%v: an old reply: %v, %v", g, done, err)
			}
			if !mutual {
				continue // a controller that proves nothing can be anybody
			}
			if _, _, err := h.Step(nil); err != nil {
				t.Fatal(err)
			}
			if _, _, err := h.Step(old.messages[1]); err != nil {
				t.Fatal(err)
			}
			if _, done, err := h.Step(old.messages[3]); done || reason(err) != Failed {
				t.Errorf("%v: an old success1: %v, %v", g, done, err)
			}
		}
	}
}

// TestReflection: a controller that knows no secret sends the host's own messages and responses back to it.
func TestReflection(t *testing.T) {
	cfg := config(t, SHA256, NoGroup, true)
	cfg.ControllerSecret = cfg.HostSecret // what should not be, but can be configured
	a, c := pair(t, cfg, cfg)
	negotiation, _, _ := a.Step(nil)
	first, _, _ := c.Step(negotiation)
	answer, _, err := a.Step(first)
	if err != nil {
		t.Fatal(err)
	}
	var r reply
	if f := r.decode(answer); f != nil {
		t.Fatal(f)
	}
	// A second transaction, in which the host answers its own challenge.
	b, _ := pair(t, cfg, cfg)
	if _, _, err := b.Step(nil); err != nil {
		t.Fatal(err)
	}
	answer, _, err = b.Step((&challenge{tid: 0x1234, hash: SHA256, seq: r.seq, challenge: r.challenge}).append(nil))
	if err != nil {
		t.Fatal(err)
	}
	var own reply
	if f := own.decode(answer); f != nil {
		t.Fatal(f)
	}
	if _, done, err := a.Step((&success1{tid: 0x1234, hashSize: 32, response: own.response}).append(nil)); done || reason(err) != Failed {
		t.Errorf("the host takes its own response for the controller's: %v, %v", done, err)
	}
}

// TestOutOfOrder gives each side, in each of its states, every message but the one that is due.
func TestOutOfOrder(t *testing.T) {
	cfg := config(t, SHA256, NoGroup, true)
	all := trial(t, cfg, cfg, nil).messages
	for state := range 3 {
		for i, m := range append(all, nil, []byte{}, []byte{0, 0, 0}, appendHeader(nil, 0x0105, 0x1234, 16), make([]byte, MaxMessage+1)) {
			h, c := pair(t, cfg, cfg)
			var toHost, toController []byte
			toController, _, _ = h.Step(nil)
			for range state {
				toHost, _, _ = c.Step(toController)
				if next, _, err := h.Step(toHost); err != nil {
					t.Fatal(err)
				} else {
					toController = next
				}
			}
			if i != 2*state {
				send, done, err := c.Step(m)
				if k, _, _ := parseHeader(send); done || k != kindFailure1 || reason(err) == 0 || i < len(all) && reason(err) != IncorrectMessage {
					t.Errorf("the controller, state %d, message %d: %v, %v, sends %x", state, i, done, err, send)
				}
			}
			if state < 2 && i != 2*state+1 {
				h, c := pair(t, cfg, cfg)
				toController, _, _ = h.Step(nil)
				for range state {
					toHost, _, _ = c.Step(toController)
					toController, _, _ = h.Step(toHost)
				}
				send, done, err := h.Step(m)
				if k, _, _ := parseHeader(send); done || k != kindFailure2 || reason(err) == 0 || i < len(all) && reason(err) != IncorrectMessage {
					t.Errorf("the host, state %d, message %d: %v, %v, sends %x", state, i, done, err, send)
				}
			}
		}
	}
}

// TestSecureChannel: a host that wants a TLS key made is told that there is none.
func TestSecureChannel(t *testing.T) {
	cfg := config(t, SHA256, FFDHE2048, true)
	o := trial(t, cfg, cfg, func(i int, b []byte) []byte {
		if i == 0 {
			b[6] = 2
		}
		return b
	})
	if reason(o.hostErr) != ConcatMismatch || reason(o.controllerErr) != ConcatMismatch {
		t.Errorf("%+v", o)
	}
}

// TestProofLeftOut: Linux's host lets a controller pass that does not prove itself when it was asked to. Ours does not, and
// takes no proof that it did not ask for.
func TestProofLeftOut(t *testing.T) {
	for _, mutual := range []bool{true, false} {
		cfg := config(t, SHA256, NoGroup, mutual)
		h, c := pair(t, cfg, cfg)
		send, _, _ := h.Step(nil)
		send, _, _ = c.Step(send)
		if _, _, err := h.Step(send); err != nil {
			t.Fatal(err)
		}
		s := success1{tid: 0x1234, hashSize: 32}
		if !mutual {
			s.response = make([]byte, 32)
		}
		if send, done, err := h.Step(s.append(nil)); done || reason(err) != IncorrectPayload || len(send) != failureSize {
			t.Errorf("mutual %v: %v, %v, sends %x", mutual, done, err, send)
		}
	}
}

// TestReplyOfOldLinux: hosts before Linux commit 6f66d046eade, and SPDK, send the sequence number 0 when they send no
// challenge.
func TestReplyOfOldLinux(t *testing.T) {
	cfg := config(t, SHA256, NoGroup, false)
	o := trial(t, cfg, cfg, func(i int, b []byte) []byte {
		if i == 2 {
			copy(b[12:16], make([]byte, 4))
		}
		return b
	})
	if !o.hostDone || !o.controllerDone {
		t.Errorf("%+v", o)
	}
}

// TestDegenerateDHValues: a peer cannot choose the session key.
func TestDegenerateDHValues(t *testing.T) {
	cfg := config(t, SHA256, FFDHE2048, true)
	p := groups[FFDHE2048].prime
	minusOne := p.FillBytes(make([]byte, 256))
	minusOne[255]--
	one := make([]byte, 256)
	one[255] = 1
	for _, value := range [][]byte{make([]byte, 256), one, minusOne, p.Bytes(), bytes.Repeat([]byte{0xFF}, 256)} {
		for message, at := range map[int]int{1: 16 + 32, 2: 16 + 64} {
			o := trial(t, cfg, cfg, func(i int, b []byte) []byte {
				if i == message {
					copy(b[at:], value)
				}
				return b
			})
			if o.hostDone || o.controllerDone || reason(o.hostErr) != IncorrectPayload || reason(o.controllerErr) != IncorrectPayload {
				t.Errorf("%x in message %d: %+v", value, message, o)
			}
		}
	}
}

func TestValidate(t *testing.T) {
	good := config(t, SHA256, NoGroup, false)
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Config){
		"host NQN":      func(c *Config) { c.HostNQN = "" },
		"subsystem NQN": func(c *Config) { c.SubsysNQN = strings.Repeat("n", 224) },
		"none of them":  func(c *Config) { c.SubsysNQN = "nqn\x00" },
		"no secret":     func(c *Config) { c.HostSecret = Secret{} },
		"hashes []":     func(c *Config) { c.Hashes = []Hash{} },
		"hashes [none]": func(c *Config) { c.Hashes = []Hash{NoHash} },
		"hash 0x04":     func(c *Config) { c.Hashes = []Hash{SHA256, 4} },
		"groups []":     func(c *Config) { c.Groups = []Group{} },
		"group 0x06":    func(c *Config) { c.Groups = []Group{6} },
		"DH groups":     func(c *Config) { c.Groups = make([]Group, 31) },
	} {
		cfg := good
		change(&cfg)
		_, errHost := NewHost(cfg, 0)
		_, errController := NewController(cfg)
		for _, err := range []error{errHost, errController} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want an error with %q", err, want)
			}
		}
	}
}

func TestSequence(t *testing.T) {
	sequence.mu.Lock()
	kept := sequence.last
	sequence.last = 1<<32 - 2
	sequence.mu.Unlock()
	defer func() {
		sequence.mu.Lock()
		sequence.last = kept
		sequence.mu.Unlock()
	}()
	if a, b, c := nextSequence(), nextSequence(), nextSequence(); a != 1<<32-1 || b != 1 || c != 2 {
		t.Errorf("%#x, %d, %d", a, b, c)
	}
}

// FuzzStep gives both sides what a peer without any secret may send, up to three messages each: neither is ever satisfied.
func FuzzStep(f *testing.F) {
	for _, mutual := range []bool{true, false} {
		cfg := config(f, SHA256, NoGroup, mutual)
		m := trial(f, cfg, cfg, nil).messages
		f.Add(m[0], m[2], m[len(m)-1], mutual)
		f.Add(m[1], m[3], m[3], mutual)
	}
	f.Fuzz(func(t *testing.T, a, b, c []byte, mutual bool) {
		cfg := config(t, SHA256, NoGroup, mutual)
		h, ct := pair(t, cfg, cfg)
		if _, _, err := h.Step(nil); err != nil {
			t.Fatal(err)
		}
		for _, m := range [][]byte{a, b, c} {
			send, done, err := ct.Step(m)
			if done || len(send) > MaxMessage {
				t.Errorf("the controller takes %x for a host's: %v", m, err)
			}
			send, done, err = h.Step(m)
			// A host that asks for no proof takes any controller.
			if done && mutual || len(send) > MaxMessage {
				t.Errorf("the host takes %x for a controller's: %v", m, err)
			}
		}
	})
}

// TestDHValueSizes has replies whose DH value, right as a number, is longer than the group's prime or there without a group.
func TestDHValueSizes(t *testing.T) {
	for _, g := range []Group{NoGroup, FFDHE2048} {
		cfg := config(t, SHA256, g, false)
		o := trial(t, cfg, cfg, func(i int, b []byte) []byte {
			if i != 2 {
				return b
			}
			var m reply
			if f := m.decode(b); f != nil {
				t.Fatal(f)
			}
			m.public = append([]byte{0}, m.public...)
			return m.append(nil)
		})
		if o.controllerDone || reason(o.controllerErr) != IncorrectPayload || reason(o.hostErr) != IncorrectPayload {
			t.Errorf("%v: %+v", g, o)
		}
	}
}

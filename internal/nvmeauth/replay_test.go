package nvmeauth

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// recording is one exchange of ours with another implementation. testdata/README.md tells how they came about.
type recording struct {
	Peer             string
	Role             string // ours: host or controller
	HostNQN          string
	SubsysNQN        string
	HostSecret       string // the secrets that our side had
	ControllerSecret string
	Hashes           []int // nil: all
	Groups           []int
	Transaction      uint16
	Random           []string // what our side drew, in order
	Sequence         []uint32
	Messages         []struct{ From, Hex string }
	Error            string // with which the exchange ended on our side
}

// TestReplayRecordings does our part of each recorded exchange again, with the same random numbers: given what the peer sent,
// each message must be the recorded one, and the end the same. The peer accepted ours when they were recorded, and its
// responses must be right for us.
func TestReplayRecordings(t *testing.T) {
	files, err := filepath.Glob("testdata/kernel-*.json")
	if err != nil || len(files) != 18 {
		t.Fatalf("%d recordings, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var r recording
			if err := json.Unmarshal(text, &r); err != nil {
				t.Fatal(err)
			}
			r.replay(t)
		})
	}
}

func (r *recording) replay(t *testing.T) {
	cfg := Config{HostNQN: r.HostNQN, SubsysNQN: r.SubsysNQN, HostSecret: parse(t, r.HostSecret)}
	if r.ControllerSecret != "" {
		cfg.ControllerSecret = parse(t, r.ControllerSecret)
	}
	for _, h := range r.Hashes {
		cfg.Hashes = append(cfg.Hashes, Hash(h))
	}
	for _, g := range r.Groups {
		cfg.Groups = append(cfg.Groups, Group(g))
	}
	drawn := chance{
		random: func(b []byte) {
			if len(r.Random) == 0 || copy(b, decodeHex(t, r.Random[0])) != len(b) {
				t.Fatalf("%d random bytes are wanted, recorded are %v", len(b), r.Random)
			}
			r.Random = r.Random[1:]
		},
		sequence: func() uint32 {
			s := r.Sequence[0]
			r.Sequence = r.Sequence[1:]
			return s
		},
	}
	var step func([]byte) ([]byte, bool, error)
	if r.Role == "host" {
		h, err := NewHost(cfg, r.Transaction)
		if err != nil {
			t.Fatal(err)
		}
		h.chance, step = drawn, h.Step
	} else {
		c, err := NewController(cfg)
		if err != nil {
			t.Fatal(err)
		}
		c.chance, step = drawn, c.Step
	}

	var received, sent []byte
	var done bool
	var err error
	if r.Role == "host" {
		sent, done, err = step(nil)
	}
	for i, m := range r.Messages {
		b := decodeHex(t, m.Hex)
		if m.From == r.Role {
			if !bytes.Equal(sent, b) {
				t.Fatalf("message %d is\n%x, recorded\n%x", i, sent, b)
			}
			sent = nil
			continue
		}
		if sent != nil || done || err != nil {
			t.Fatalf("before message %d: %x to be sent, done %v, %v", i, sent, done, err)
		}
		if received = b; r.Role == "host" {
			received = append(b, make([]byte, MaxMessage-len(b))...) // as it came
		}
		sent, done, err = step(received)
	}
	switch {
	case sent != nil:
		t.Errorf("one more message: %x", sent)
	case r.Error == "" && (!done || err != nil):
		t.Errorf("not done: %v", err)
	case r.Error != "" && (done || err == nil || err.Error() != r.Error):
		t.Errorf("done %v, %v; recorded %s", done, err, r.Error)
	case len(r.Random) != 0 || len(r.Sequence) != 0:
		t.Errorf("not drawn: %v, %v", r.Random, r.Sequence)
	}
}

func decodeHex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

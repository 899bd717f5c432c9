package nvmeauth

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// What nvme-cli 2.3 printed for the secret 00 01 02 ... of 32, 48 and 64 bytes:
//
//	nvme gen-dhchap-key -m HASH -l SIZE -s HEX -n NQN
//
// With -m 1 to 3 it prints the secret after the transformation that is done once more where it is used.
const vectorNQN = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000042"

var vectors = []struct {
	hash              Hash
	size              int
	plain, transforms string
}{
	{SHA256, 32, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
		"DHHC-1:01:DHolBy9WZKYR7B/uob85z2SVb8dUcPHxmN3jtIjYKX3GKVS1:"},
	{SHA384, 48, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:",
		"DHHC-1:02:lrPTyqAVlp3gcAoB8343MH2AA3HsbpE6p1BrlCgIECRCtL8ec5tMvgV8wi0roZioc+SQMA==:"},
	{SHA512, 64, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+P4zODhA=:",
		"DHHC-1:03:NTuNEmZ41oWjo3bvWipjWu1dzLT/Zj+pmMBebe7tuJPiSd/R6NL9nJD0mcByr+oo7Z4Cg+eXx5VK/xsQtn7TldOC8+U=:"},
}

func count(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

func parse(t testing.TB, text string) Secret {
	t.Helper()
	s, err := ParseSecret(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSecretVectors(t *testing.T) {
	for _, v := range vectors {
		plain := parse(t, v.plain)
		if got := plain.key(vectorNQN); !bytes.Equal(got, count(v.size)) {
			t.Errorf("%s is the key %x, want the secret itself", v.plain, got)
		}
		for _, text := range []string{v.plain, v.transforms} {
			if got := parse(t, " "+text+"\n").Text(); got != text {
				t.Errorf("text %s, want %s", got, text)
			}
		}
		want := parse(t, v.transforms)
		if (*want.s).hash != v.hash {
			t.Errorf("%s: %v, want %v", v.transforms, (*want.s).hash, v.hash)
		}
		if got := makeSecret(v.hash, count(v.size)).key(vectorNQN); !bytes.Equal(got, (*want.s).key) {
			t.Errorf("%v: transformed to %x, want %x", v.hash, got, (*want.s).key)
		}
	}
}

// newSecret draws a secret to be transformed by h.
func newSecret(h Hash) Secret {
	key := make([]byte, max(h.size(), 32))
	rand.Read(key)
	return makeSecret(h, key)
}

func TestParseSecretErrors(t *testing.T) {
	good := vectors[0].plain
	encoded := strings.Split(good, ":")[2]
	for _, tt := range []struct{ text, want string }{
		{"", "begin with DHHC-1"},
		{"NVMeTLSkey-1:01:" + encoded + ":", "begin with DHHC-1"},
		{"DHHC-1", "cut off"},
		{strings.TrimSuffix(good, ":"), "cut off"},
		{good + "x", "cut off"},
		{good + ":", "cut off"},
		{"DHHC-1:04:" + encoded + ":", "the hash must be"},
		{"DHHC-1:0:" + encoded + ":", "the hash must be"},
		{"DHHC-1::" + encoded + ":", "the hash must be"},
		{"DHHC-1:00::", "0 bytes"},
		{"DHHC-1:00:AAEC:", "3 bytes"},
		{"DHHC-1:00:" + base64.StdEncoding.EncodeToString(count(37)) + ":", "37 bytes"},
		{"DHHC-1:00:" + base64.StdEncoding.EncodeToString(count(36)) + ":", "checksum"},
		{"DHHC-1:00:" + strings.Replace(encoded, "AAEC", "AAED", 1) + ":", "checksum"},
		{"DHHC-1:00:" + encoded[:40] + "\n" + encoded[40:] + ":", "line break"},
		{"DHHC-1:00:" + encoded[:40] + "!" + encoded[41:] + ":", "not base64"},
		{"DHHC-1:00:" + encoded[:47] + ":", "not base64"},
		// The last character before the padding has bits that say nothing: only one way to write them is right.
		{strings.Replace(vectors[1].plain, "BQ==", "BR==", 1), "not base64"},
	} {
		s, err := ParseSecret(tt.text)
		if err == nil || !strings.Contains(err.Error(), tt.want) || !s.IsZero() {
			t.Errorf("%q: %v, %v; want an error with %q", tt.text, s.Text(), err, tt.want)
		} else if strings.Contains(err.Error(), encoded[4:20]) {
			t.Errorf("the error shows the secret: %v", err)
		}
	}
}

func TestSecretIsNotShown(t *testing.T) {
	text := vectors[0].plain
	s := parse(t, text)
	type inside struct {
		Exported Secret
		hidden   Secret
	}
	var shown bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%c", "%t", "%p"} {
		for _, v := range []any{s, &s, []Secret{s}, map[string]Secret{"": s}, inside{s, s}, &inside{s, s}, Config{HostSecret: s}} {
			fmt.Fprintf(&shown, verb+"\n", v)
		}
	}
	slog.New(slog.NewTextHandler(&shown, nil)).Info("", "secret", s, "config", Config{HostSecret: s})
	slog.New(slog.NewJSONHandler(&shown, nil)).Info("", "secret", s, "config", Config{HostSecret: s})
	if err := json.NewEncoder(&shown).Encode(inside{s, s}); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{text[10:30], "[0 1 2 3", "00010203", "0x0, 0x1, 0x2", "\x00\x01\x02", `\x00\x01`} {
		if strings.Contains(shown.String(), bad) {
			t.Errorf("a secret is shown, by %q, in\n%s", bad, shown.String())
		}
	}
	if got := s.String(); got != "DHHC-1 secret (not shown)" {
		t.Errorf("String is %q", got)
	}
	if got := fmt.Sprint(Secret{}); got != "no secret" || (Secret{}).Text() != "" {
		t.Errorf("no secret is shown as %q", got)
	}
}

func FuzzParseSecret(f *testing.F) {
	for _, v := range vectors {
		f.Add(v.plain)
		f.Add(v.transforms)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSecret(text)
		if err != nil {
			return
		}
		if got := s.Text(); got != strings.TrimSpace(text) {
			t.Errorf("%q is %q again", text, got)
		}
	})
}

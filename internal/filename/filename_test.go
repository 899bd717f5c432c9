package filename

import (
	"encoding/json"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"unicode"
)

// names is what a name can be like.
var names = []string{
	"plain", "train/shard-0017.tar", "größe=1,2:3@4%5+6", "日本語", "", "a b", "a\nb", "tab\there", "it's", "'", `back\slash`, `\x41`, "$HOME", "*", "[a]", `"q"`,
	"\x1b[31mred", "\xff\xfe", "gr\xf6\xdfe", "\x80A\xbf1", "a\xe2\x82", "\ufffd", "\u202egnp.exe", "\u00a0", "💀", "\xed\xb3\xbf", "~", "-rf", "a;b", "\x7f\x01",
}

func TestQuote(t *testing.T) {
	for name, want := range map[string]string{
		"plain": "plain", "größe=1,2:3@4%5+6": "größe=1,2:3@4%5+6", "": "''", "a b": "'a b'", "a\nb": `$'a\x0ab'`, "it's": `$'it\'s'`, `a\b`: `'a\b'`, "a\\\n": `$'a\\\x0a'`,
		"\x1b[31m": `$'\x1b[31m'`, "gr\xf6\xdfe": `$'gr\xf6\xdfe'`, "\u202ea": `$'\xe2\x80\xaea'`, "\ufffd": "\ufffd",
	} {
		if got := Quote(name); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
	if got := Escape("a b: it's\x1b[0m \xff"); got != `a b: it's\x1b[0m \xff` {
		t.Errorf("Escape: %s", got)
	}
	for _, name := range names {
		if strings.ContainsFunc(Quote(name), func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q: %q has something that is not to be printed", name, Quote(name))
		}
	}
	var script strings.Builder
	for _, name := range names {
		script.WriteString("printf '%s\\0' " + Quote(name) + "\n")
	}
	out, err := exec.Command("bash", "-c", script.String()).Output()
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Split(string(out), "\x00")
	if len(got) != len(names)+1 {
		t.Fatalf("%d names, want %d", len(got)-1, len(names))
	}
	for i, name := range names {
		if got[i] != name {
			t.Errorf("%q: %s is %q for a shell", name, Quote(name), got[i])
		}
	}
}

func TestJSON(t *testing.T) {
	back := func(name string) {
		t.Helper()
		b, err := json.Marshal(struct{ Name JSON }{JSON(name)})
		if err != nil {
			t.Fatal(err)
		}
		var got struct{ Name JSON }
		if err := json.Unmarshal(b, &got); err != nil || string(got.Name) != name {
			t.Errorf("%q: %s is %q, %v", name, b, got.Name, err)
		}
	}
	for _, name := range names {
		back(name)
	}
	const seed = 27
	r := rand.New(rand.NewPCG(seed, 0))
	for range 20_000 {
		b := make([]byte, r.IntN(12))
		for i := range b {
			b[i] = "a\\\"\n\x80\xbf\xc3\xed\xf0\x9f\x92\xff"[r.IntN(12)]
		}
		back(string(b))
	}
	for in, want := range map[string]string{`"\ud83d\udc80"`: "💀", `"\\udcff"`: `\udcff`, `"\udcff\ud83d\udc80\udc80x"`: "\xff💀\x80x",
		`null`: "", `"\ud83d"`: "\ufffd",
		`"\ud83d12345\\udc80"`: `�12345\udc80`, `"\ud83dabc\udc80"`: "\ufffdabc\x80"} {
		var got JSON
		if err := json.Unmarshal([]byte(in), &got); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v, want %q", in, got, err, want)
		}
	}
	for name, want := range map[string]string{"größe": `"größe"`, "gr\xf6\xdfe": `"gr\udcf6\udcdfe"`, "<&>": `"<&>"`} {
		if got, err := JSON(name).MarshalJSON(); err != nil || string(got) != want {
			t.Errorf("%q: %s, %v, want %s", name, got, err, want)
		}
	}
	if err := json.Unmarshal([]byte("7"), new(JSON)); err == nil {
		t.Error("a number is taken for a name")
	}
}

package nvmeauth

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

func secretFile(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "secrets")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestReadSecrets(t *testing.T) {
	host, ctrl, other := newSecret(SHA256).Text(), newSecret(SHA512).Text(), newSecret(NoHash).Text()
	s, err := ReadSecrets(secretFile(t, "# of this host\n\n* "+host+"\n nqn.2024-01.test:a\t"+other+"  "+ctrl+"\r\nodd "+ctrl))
	if err != nil {
		t.Fatal(err)
	}
	var none *Secrets
	for _, c := range []struct {
		s                     *Secrets
		nqn, host, controller string
	}{
		{s, "nqn.2024-01.test:a", other, ctrl},
		{s, "nqn.2024-01.test:b", host, ""},
		{s, "odd", ctrl, ""},
		{s, wire.DiscoveryNQN, "", ""},
		{none, "nqn.2024-01.test:a", "", ""},
	} {
		if h, k := c.s.For(c.nqn); h.Text() != c.host || k.Text() != c.controller {
			t.Errorf("%s: not the right ones", c.nqn)
		}
	}
}

func TestReadSecretsErrors(t *testing.T) {
	good := newSecret(SHA256).Text()
	body := strings.Split(good, ":")[2]
	other := "x"
	if good[20] == 'x' {
		other = "y"
	}
	for name, c := range map[string]struct{ text, want string }{
		"empty":       {"# nothing\n\n", "no line with a secret"},
		"secret only": {good + "\n", "line 1: 1 words: want NQN DHHC-1:"},
		"no NQN":      {"\n" + good + " " + good, "line 2: the first word is no NQN"},
		"bad NQN":     {"nqn." + body + " " + good, "line 1: the first word is no NQN"},
		"four":        {"* " + good + " " + good + " " + body, "line 1: 4 words"},
		"twice":       {"* " + good + "\na " + good + "\n* " + good, "line 3: this NQN is there twice"},
		"damaged":     {"a " + good + "\nb " + good[:20] + other + good[21:], "line 2: the host's: NVMe secret: "},
		"controller":  {"a " + good + " " + body, "line 1: the controller's: NVMe secret: does not begin with DHHC-1"},
	} {
		file := secretFile(t, c.text)
		_, err := ReadSecrets(file)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if err != nil && (strings.Contains(err.Error(), body[:20]) || strings.Contains(err.Error(), body[21:])) {
			t.Errorf("%s: the error shows a secret", name)
		}
	}
	file := secretFile(t, "* "+good)
	for _, mode := range []os.FileMode{0o640, 0o604, 0o620, 0o610} {
		os.Chmod(file, mode)
		if _, err := ReadSecrets(file); err == nil || !strings.Contains(err.Error(), "chmod 600 "+file) {
			t.Errorf("mode %v: %v", mode, err)
		}
	}
	os.Chmod(file, 0o400)
	if _, err := ReadSecrets(file); err != nil {
		t.Error(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(file, 12345, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadSecrets(file); err == nil || !strings.Contains(err.Error(), "belongs to user 12345") {
			t.Errorf("another one's file: %v", err)
		}
	}
	if _, err := ReadSecrets(filepath.Dir(file)); err == nil || !strings.Contains(err.Error(), "regular file") {
		t.Errorf("a directory: %v", err)
	}
	if _, err := ReadSecrets(file + ".not"); !os.IsNotExist(err) {
		t.Errorf("no file: %v", err)
	}
}

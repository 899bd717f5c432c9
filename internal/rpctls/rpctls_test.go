package rpctls_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/rpctls/tlstest"
)

// TestFiles: what does not go together is refused, and the message says why.
func TestFiles(t *testing.T) {
	ca := tlstest.New(t)
	own, other := ca.Issue(), ca.Issue()
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		policy rpctls.Policy // empty: of a server
		files  rpctls.Files
		want   string
	}{
		{rpctls.None, rpctls.Files{}, ""},
		{rpctls.None, rpctls.Files{CA: own.CA}, "xprtsec=tls"},
		{"ssl", rpctls.Files{}, "none, tls or mtls"},
		{rpctls.TLS, rpctls.Files{}, ""},
		{rpctls.TLS, rpctls.Files{CA: own.CA}, ""},
		{rpctls.TLS, own, "xprtsec=mtls"},
		{rpctls.TLS, rpctls.Files{CA: junk}, "there is none in " + junk},
		{rpctls.TLS, rpctls.Files{CA: junk + "2"}, "no such file"},
		{rpctls.Mutual, own, ""},
		{rpctls.Mutual, rpctls.Files{CA: own.CA}, "are needed"},
		{rpctls.Mutual, rpctls.Files{Cert: own.Cert}, "go together"},
		{rpctls.Mutual, rpctls.Files{Cert: own.Cert, Key: other.Key}, "private key does not match"},
		{"", own, ""},
		{"", rpctls.Files{CA: own.CA}, "needs a certificate"},
	} {
		var err error
		if tc.policy == "" {
			_, err = rpctls.Server(tc.files)
		} else {
			_, err = rpctls.Client(tc.policy, tc.files)
		}
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q, %+v: error %v, want %q", tc.policy, tc.files, err, tc.want)
		}
	}
}

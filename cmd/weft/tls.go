package main

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/rpctls"
)

// tlsDir is where a host keeps what it proves itself with.
const tlsDir = "/etc/weft/tls"

// secrecy says how connections are protected.
type secrecy struct {
	policy rpctls.Policy // "": mtls if dir has a certificate, or else none
	data   rpctls.Policy // of connections to data servers; "": the same
	dir    string        // "": tlsDir
	files  rpctls.Files  // in place of those in dir
}

// settle returns it with what goes without saying.
func (s secrecy) settle() secrecy {
	if s.files == (rpctls.Files{}) {
		if s.dir == "" {
			s.dir = tlsDir
		}
		in := rpctls.Dir(s.dir)
		if s.policy == "" {
			s.policy = rpctls.Mutual
			// Whatever else is wrong with it is said later: clear text is for who does not have one.
			if _, err := os.Stat(in.Cert); os.IsNotExist(err) {
				s.policy = rpctls.None
			}
		}
	}
	if s.policy == "" {
		s.policy = rpctls.None
	}
	if s.data == "" {
		s.data = s.policy
	}
	return s
}

// clients are for connections to metadata services and to data servers. nil: they are in clear text.
func (s secrecy) clients() (metadata, data *rpctls.Client, err error) {
	s = s.settle()
	if s.policy == rpctls.None && s.data == rpctls.None {
		_, err = rpctls.NewClient(rpctls.None, s.files) // which says what is not used
		return nil, nil, err
	}
	if metadata, err = s.client(s.policy); err == nil {
		data, err = s.client(s.data)
	}
	return metadata, data, err
}

func (s secrecy) client(policy rpctls.Policy) (*rpctls.Client, error) {
	files := s.files
	ofDir := files == (rpctls.Files{})
	if ofDir {
		files = rpctls.Dir(s.dir)
		if _, err := os.Stat(files.CA); policy == rpctls.TLS && os.IsNotExist(err) && s.dir == tlsDir {
			files.CA, files.CRL = "", "" // the system's
		}
	}
	switch {
	case policy == rpctls.None:
		return nil, nil
	case policy == rpctls.TLS && (ofDir || s.policy != s.data):
		files.Cert, files.Key = "", ""
	}
	return rpctls.NewClient(policy, files)
}

// setPolicy is the value of an option.
func setPolicy(p *rpctls.Policy, v string) error {
	switch *p = rpctls.Policy(v); *p {
	case rpctls.None, rpctls.TLS, rpctls.Mutual:
		return nil
	}
	return fmt.Errorf("want none, tls or mtls")
}

// service is the metadata service that a command talks to.
type service struct {
	hosts string // empty: that of the mounted volume
	secrecy
}

// serviceFlag adds the flags that say which one it is.
func serviceFlag(fl *pflag.FlagSet) *service {
	s := new(service)
	fl.StringVar(&s.hosts, "server", "", "metadata service HOST[:PORT][,HOST...] (default: that of the mounted volume)")
	fl.StringVar((*string)(&s.policy), "xprtsec", "", "the connection to it: none, tls or mtls (default: mtls if there is a certificate in the directory of --tls-dir, or else none)")
	fl.StringVar(&s.dir, "tls-dir", tlsDir, "directory with ca.pem, cert.pem and key.pem")
	return s
}

package nvmeauth

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// anySubsystem stands in a file of secrets for all subsystems that it does not name. The discovery service is none of these.
const anySubsystem = "*"

// Secrets are what a host has for subsystems. A nil *Secrets has none.
type Secrets struct {
	of map[string]secretPair // by NQN, or anySubsystem
}

type secretPair struct{ host, controller Secret }

// For returns the host's secret for a subsystem, and the one by which the controller has to prove itself; zero: none.
func (s *Secrets) For(nqn string) (host, controller Secret) {
	if s == nil {
		return
	}
	p, ok := s.of[nqn]
	if !ok && nqn != wire.DiscoveryNQN {
		p = s.of[anySubsystem]
	}
	return p.host, p.controller
}

// ReadSecrets reads a file that nobody but its owner may read or write, who must be the one that reads it here. Each line has the NQN of a
// subsystem, or "*" for all that are not named, the secret of the host for it and, if the controller is to prove itself, too, its secret. Empty lines and
// those that begin with "#" say nothing.
//
// Errors name the file and the line, and never repeat what is in it.
func ReadSecrets(file string) (*Secrets, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe is not waited for
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	owner := st.Sys().(*syscall.Stat_t).Uid
	switch {
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("%s: want a regular file with NVMe secrets", file)
	case owner != uint32(os.Geteuid()):
		return nil, fmt.Errorf("%s belongs to user %d, but user %d reads it: NVMe secrets are taken from a file of one's own only: chown %d %s",
			file, owner, os.Geteuid(), os.Geteuid(), file)
	case st.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("%s has mode %04o: others can get at the NVMe secrets in it: chmod 600 %s", file, st.Mode().Perm(), file)
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	s := &Secrets{of: map[string]secretPair{}}
	number := 0
	for line := range strings.Lines(string(b)) {
		number++
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		if err := s.add(words); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", file, number, err)
		}
	}
	if len(s.of) == 0 {
		return nil, fmt.Errorf("%s has no line with a secret: %w", file, errLine)
	}
	return s, nil
}

var errLine = errors.New("want NQN DHHC-1:...[ DHHC-1:...], with * as NQN for all subsystems that are not named")

// add takes a line in.
func (s *Secrets) add(words []string) error {
	nqn := words[0]
	if len(words) < 2 || len(words) > 3 {
		return fmt.Errorf("%d words: %w", len(words), errLine)
	}
	if nqn != anySubsystem && (strings.HasPrefix(nqn, secretPrefix) || wire.CheckNQN(nqn) != nil) {
		return fmt.Errorf("the first word is no NQN: %w", errLine)
	}
	if _, ok := s.of[nqn]; ok {
		return errors.New("this NQN is there twice: leave one of them out")
	}
	var p secretPair
	var err error
	if p.host, err = ParseSecret(words[1]); err != nil {
		return fmt.Errorf("the host's: %w", err)
	}
	if len(words) == 3 {
		if p.controller, err = ParseSecret(words[2]); err != nil {
			return fmt.Errorf("the controller's: %w", err)
		}
	}
	s.of[nqn] = p
	return nil
}

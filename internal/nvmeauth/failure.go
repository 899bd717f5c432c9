package nvmeauth

import "fmt"

// Reason says why an authentication failed, by the number that failure messages have in their explanation field.
type Reason uint8

const (
	Failed           Reason = 1 + iota // a response was wrong, or there is no secret to answer with
	ProtocolUnusable                   // no DH-HMAC-CHAP
	ConcatMismatch                     // secure channel concatenation
	HashUnusable                       // no hash in common
	GroupUnusable                      // no DH group in common
	IncorrectPayload                   // a message with a wrong field
	IncorrectMessage                   // not the message that is due
)

var reasons = [...]string{
	Failed:           "authentication failed",
	ProtocolUnusable: "authentication protocol not usable",
	ConcatMismatch:   "secure channel concatenation mismatch",
	HashUnusable:     "hash not usable",
	GroupUnusable:    "DH group not usable",
	IncorrectPayload: "incorrect payload",
	IncorrectMessage: "incorrect message",
}

func (r Reason) String() string {
	if int(r) < len(reasons) && r != 0 {
		return reasons[r]
	}
	return fmt.Sprintf("reason %#02x", uint8(r))
}

// Failure is the error of an authentication that failed, on this side or on the peer's.
type Failure struct {
	Reason       Reason
	ByPeer       bool   // the peer said so; else we found it, and have a message that tells the peer
	Host, Subsys string // NQNs
	Text         string // what was wrong and what to look at
}

func (f *Failure) Error() string {
	return fmt.Sprintf("NVMe authentication of host %s at subsystem %s: %s", f.Host, f.Subsys, f.Text)
}

func failf(r Reason, format string, args ...any) *Failure {
	return &Failure{Reason: r, Text: fmt.Sprintf(format, args...)}
}

// peerFailure is what the peer's failure message says.
func peerFailure(b []byte, text string) *Failure {
	r, f := decodeFailure(b)
	if f != nil {
		return f
	}
	f = failf(r, "%s: %s", text, r)
	if r == Failed {
		f.Text += ": compare the secrets on both sides"
	}
	f.ByPeer = true
	return f
}

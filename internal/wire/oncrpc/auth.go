package oncrpc

import (
	"fmt"

	"github.com/weftfs/weft/internal/wire/xdr"
)

// Flavor is the kind of a credential or verifier.
type Flavor uint32

// The flavors.
const (
	FlavorNone Flavor = 0 // AUTH_NONE
	FlavorSys  Flavor = 1 // AUTH_SYS
	FlavorGSS  Flavor = 6 // RPCSEC_GSS
	FlavorTLS  Flavor = 7 // AUTH_TLS: asks for TLS, in a NULL call only (RFC 9289 4.1)
)

func (f Flavor) String() string {
	switch f {
	case FlavorNone:
		return "AUTH_NONE"
	case FlavorSys:
		return "AUTH_SYS"
	case FlavorGSS:
		return "RPCSEC_GSS"
	case FlavorTLS:
		return "AUTH_TLS"
	}
	return fmt.Sprintf("auth flavor %d", uint32(f))
}

// StartTLS is the body of the verifier, of flavor AUTH_NONE, with which a server answers a NULL call of FlavorTLS when
// it is ready for the TLS handshake (RFC 9289 4.1).
const StartTLS = "STARTTLS"

// OffersTLS tells whether r is the answer of a server that is ready for the TLS handshake.
func (r *Reply) OffersTLS() bool {
	return r.Stat == Success && r.Verf.Flavor == FlavorNone && string(r.Verf.Body) == StartTLS
}

// Auth is an opaque_auth: a credential or a verifier (RFC 5531 8.2). The zero Auth is AUTH_NONE.
//
// As a credential it is already encoded: a client makes one per user with AuthSys.Auth, keeps it, and appending it to
// a call is one copy.
type Auth struct {
	Flavor Flavor
	Body   []byte // at most MaxAuthBody bytes
}

func (a *Auth) append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(a.Flavor))
	return xdr.AppendOpaque(b, a.Body)
}

func (a *Auth) decode(d *xdr.Decoder) {
	a.Flavor = Flavor(d.Uint32())
	a.Body = d.Opaque(MaxAuthBody)
}

// AuthSys is the body of an AUTH_SYS credential (RFC 5531 appendix A). Nothing in it is proved.
type AuthSys struct {
	Stamp    uint32 // arbitrary
	Machine  string // name of the client, at most MaxMachineName bytes
	UID, GID uint32
	GIDs     []uint32 // supplementary groups, at most MaxGIDs
}

// Auth encodes a into a credential, to be kept and used for any number of calls. The error says which limit is
// exceeded; a user in too many groups is for the caller to cut, since only it knows which groups matter.
func (a *AuthSys) Auth() (Auth, error) {
	if len(a.Machine) > MaxMachineName {
		return Auth{}, fmt.Errorf("oncrpc: AUTH_SYS machine name of %d bytes: %w", len(a.Machine), xdr.ErrTooLong)
	}
	if len(a.GIDs) > MaxGIDs {
		return Auth{}, fmt.Errorf("oncrpc: AUTH_SYS with %d groups: %w", len(a.GIDs), xdr.ErrTooLong)
	}
	return Auth{Flavor: FlavorSys, Body: a.append(nil)}, nil
}

func (a *AuthSys) append(b []byte) []byte {
	b = xdr.AppendUint32(b, a.Stamp)
	b = xdr.AppendString(b, a.Machine)
	b = xdr.AppendUint32(b, a.UID)
	b = xdr.AppendUint32(b, a.GID)
	b = xdr.AppendUint32(b, uint32(len(a.GIDs)))
	for _, g := range a.GIDs {
		b = xdr.AppendUint32(b, g)
	}
	return b
}

// Decode reads the body of a credential of FlavorSys. It reuses the capacity of GIDs and keeps Machine if it is the
// same, so that decoding into one AuthSys per connection does not allocate when the credentials of the calls are alike.
// Nothing in a aliases body. After an error, which a server answers with AuthError and AuthBadCred, a means nothing.
func (a *AuthSys) Decode(body []byte) error {
	d := xdr.NewDecoder(body)
	a.Stamp = d.Uint32()
	if m := d.Opaque(MaxMachineName); string(m) != a.Machine {
		a.Machine = string(m)
	}
	a.UID = d.Uint32()
	a.GID = d.Uint32()
	n := d.Uint32()
	if n > MaxGIDs {
		d.Fail(fmt.Errorf("AUTH_SYS with %d groups: %w", n, xdr.ErrTooLong))
		n = 0
	}
	a.GIDs = a.GIDs[:0]
	for range n {
		a.GIDs = append(a.GIDs, d.Uint32())
	}
	return d.Err()
}

// AuthStat says why a credential or verifier was refused (auth_stat, RFC 5531 9).
type AuthStat uint32

// The reasons.
const (
	AuthOK           AuthStat = 0
	AuthBadCred      AuthStat = 1  // malformed credential
	AuthRejectedCred AuthStat = 2  // begin a new session
	AuthBadVerf      AuthStat = 3  // malformed verifier
	AuthRejectedVerf AuthStat = 4  // expired or replayed
	AuthTooWeak      AuthStat = 5  // for instance AUTH_SYS where TLS or Kerberos is wanted
	AuthInvalidResp  AuthStat = 6  // local: bogus verifier in a reply
	AuthFailed       AuthStat = 7  // local: unknown reason
	AuthGSSCredProb  AuthStat = 13 // RPCSEC_GSS: no credentials for the user
	AuthGSSCtxProb   AuthStat = 14 // RPCSEC_GSS: problem with the context
)

func (s AuthStat) String() string {
	switch s {
	case AuthOK:
		return "AUTH_OK"
	case AuthBadCred:
		return "AUTH_BADCRED"
	case AuthRejectedCred:
		return "AUTH_REJECTEDCRED"
	case AuthBadVerf:
		return "AUTH_BADVERF"
	case AuthRejectedVerf:
		return "AUTH_REJECTEDVERF"
	case AuthTooWeak:
		return "AUTH_TOOWEAK"
	case AuthInvalidResp:
		return "AUTH_INVALIDRESP"
	case AuthFailed:
		return "AUTH_FAILED"
	case AuthGSSCredProb:
		return "RPCSEC_GSS_CREDPROBLEM"
	case AuthGSSCtxProb:
		return "RPCSEC_GSS_CTXPROBLEM"
	}
	return fmt.Sprintf("auth_stat %d", uint32(s))
}

// Package ca is a private certificate authority for weft: certificates of services and clients, and the list of those that are
// revoked.
//
// A CA is a directory:
//
//	ca.pem            its certificate, which everybody gets
//	ca.key            its key (mode 600), which nobody gets
//	crl.pem           the list of revoked certificates (RFC 5280), signed by it; made by the first that is revoked
//	issued/SERIAL.pem every certificate that it has signed
//	tokens/ID.json    join tokens that have not expired: hashes of the secret, and of the key that it was used for
//	lock              locked (flock) by whoever changes something
//
// Keys are ECDSA on P-256. A certificate has a name (CN), and if it is one of a service the
// organization [rpctls.ServiceOrganization] and the names and addresses at which it is reached. Those of services may be used by both sides of
// a connection, the others by clients alone.
//
// A host gets its certificate by files that somebody brings it, or by a token (weft1.ID.SECRET.PIN) that somebody tells it: it makes a key, and asks the CA
// over HTTPS (POST /v1/join) for a certificate of it, JSON both ways. The CA is known by its certificate's SHA-256 in the token. A token is good for one key, so
// that who did not hear the answer can ask again, and nobody else. A host that has a certificate gets the next one, of a new key, by that (POST /v1/renew); each answer has the list of
// those that are revoked.
package ca

// Package ca is a private certificate authority for weft: certificates of services and clients, and the list of those that are
// revoked.
//
// A CA is a directory:
//
//	ca.pem            its certificate, which everybody gets
//	ca.key            its key (mode 600), which nobody gets
//	crl.pem           the list of revoked certificates (RFC 5280), signed by it; made by the first that is revoked
//	issued/SERIAL.pem every certificate that it has signed
//	lock              locked (flock) by whoever changes something
//
// Keys are ECDSA on P-256. A certificate has a name (CN), and if it is one of a service the
// organization [rpctls.ServiceOrganization] and the names and addresses at which it is reached. Those of services may be used by both sides of
// a connection, the others by clients alone.
package ca

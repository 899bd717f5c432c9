// Package nvmeauth is the in-band authentication of NVMe over Fabrics, DH-HMAC-CHAP, for the host and for the controller. It
// has no sockets, no goroutines and no clock: messages are byte slices, which the caller carries. [ReadSecrets] reads a
// host's secrets from a file. The documents are the NVMe
// Base Specification 2.2, section 8.3.4 (8.13 in 2.0; TP 8006); where they leave a choice, this package does what Linux and
// SPDK understand.
//
// It proves who is at the other end when the queue is connected. It protects nothing that comes later on the connection: that
// is TLS's work. Secure channel concatenation, that is making a TLS key out of an authentication, is not offered, and refused
// when a host asks for it.
//
// # Carrying the messages
//
// A controller that wants a host to authenticate says so in its answer to Connect (AUTHREQ). Each queue is authenticated by
// itself, after its Connect and before any other command. The host drives: it puts a message to the controller in an
// Authentication Send command (fabrics command type 0x05) and fetches one by Authentication Receive (0x06), both with SECP 0xE9
// and SPSP0 and SPSP1 1. The length of a send is the message's; a receive asks for [MaxMessage] bytes, and what the controller
// has is shorter: the rest of the buffer may be zeros. Both commands succeed also when the authentication does not: failures
// are messages as well.
//
//	host                                          controller
//	negotiate: hashes, DH groups, T_ID      ->
//	                                        <-    challenge: hash, group, S1, C1, g^y
//	reply: R1, g^x, and C2, S2 if wanted    ->
//	                                        <-    success1: R2 if C2 was sent
//	success2, if C2 was sent                ->
//
// The controller answers failure1 in place of any message of its own. The host sends failure2. After either the connection is
// closed. [Host.Step] and [Controller.Step] take the message that came and give the one to send: each Host and Controller
// serves one transaction of one queue. A controller that is asked for a message when it has none calls Step(nil), which fails
// the transaction as any wrong message does. Who waits for whom, and how long, is the caller's business.
//
// # Secrets and responses
//
// A secret has 32, 48 or 64 bytes, and a text form that ends with the CRC-32 (IEEE, little-endian) of them:
//
//	DHHC-1:<hh>:<base64 of secret and CRC-32>:
//
// hh says which hash turns the secret into the key K of the responses: 00 none, the secret is the key; 01, 02, 03 SHA-256,
// SHA-384, SHA-512:
//
//	K  = HMAC(secret, NQN || "NVMe-over-Fabrics")
//
// where NQN is that of the side that proves itself by the secret. Older Linux kernels use as many bytes of K as the secret has,
// so a secret is best made as long as the digest of its hash, which is what nvme-cli does. This hash and the one
// that is negotiated, H below, are independent of one another. With a DH group the challenge C is replaced by Ca, and without a
// group Ca is C:
//
//	Ks = g^xy mod p, big-endian, as long as p
//	Ca = HMAC(H(Ks), C)
//
// The host proves itself by R1, from C1 and S1, the controller by R2, from C2 and S2; integers are little-endian, S has 4
// bytes, T_ID 2, SC_C 1 (0: no secure channel), and the strings no end but what is written:
//
//	R1 = HMAC(K host,       Ca1 || S1 || T_ID || SC_C || "HostHost"   || host NQN      || 0x00 || subsystem NQN)
//	R2 = HMAC(K controller, Ca2 || S2 || T_ID || SC_C || "Controller" || subsystem NQN || 0x00 || host NQN)
//
// # Messages
//
// All integers are little-endian, DH values big-endian. Every message begins with AUTH_TYPE at 0 (0 common, 1 DH-HMAC-CHAP),
// AUTH_ID at 1 and T_ID at 4 (u16); what is not listed is reserved: zero when sent, not looked at when received.
//
//	negotiate 0/00, 8+64n:      SC_C@6 NAPD@7 (n), per protocol: AUTHID@0 (1) HALEN@2 DHLEN@3 hashes@4 (30) groups@34 (30)
//	challenge 1/01, 16+HL+DHV:  HL@6 HASHID@8 DHGID@9 DHVLEN@10 (u16) S1@12 (u32) C1@16 (HL) g^y (DHVLEN)
//	reply     1/02, 16+2HL+DHV: HL@6 CVALID@8 DHVLEN@10 (u16) S2@12 (u32) R1@16 (HL) C2 (HL) g^x (DHVLEN)
//	success1  1/03, 16+HL:      HL@6 RVALID@8 R2@16 (HL, only with RVALID 1)
//	success2  1/04, 16
//	failure2  0/F0, 8:          reason@6 (1) explanation@7
//	failure1  0/F1, 8:          the same
//
// # What is not protected
//
// The lists of the negotiate message are not part of any response, so somebody between the two can shorten them. The host
// refuses a challenge with a hash or group that it did not offer: whoever needs a strong group offers nothing else.
//
// The arithmetic is math/big's, whose time depends on the exponent. Exponents are drawn anew for each transaction, used in it
// twice and forgotten, so what one measurement may tell of one of them is of no use for another; secrets go through HMAC only,
// and responses are compared in constant time.
package nvmeauth

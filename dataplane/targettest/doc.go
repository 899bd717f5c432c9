// Package targettest is the behaviour that every dataplane.Target shares, as a test suite, and a data server in memory
// for tests that need one.
//
// [Run] takes a function that opens a target with a way to make data files; the tests of each implementation call it.
// It holds a target to what the comments of dataplane.Target and layout.Op say, and to what the NFSv3 data path
// promises (RFC 1813 sections 3.3.6, 3.3.7 and 3.3.21): stability, verifiers, ends of files and holes.
//
// [Server] keeps its files in two states, what is written and what is stable, and a restart loses what lies
// between, so that tests can tell whether a client lost something that it had acknowledged. It is not for use outside tests.
package targettest

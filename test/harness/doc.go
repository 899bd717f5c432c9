// Package harness starts whole weft systems for the tests below test/: the real programs, as processes of their own, on
// free ports and in directories of the test. What a test starts is ended with it, also when it fails; the logs are
// printed then.
//
// A test must not use a mount that its own process serves (at GOMAXPROCS=1 a blocking system call on it would starve the
// server), which is one more reason for processes.
package harness

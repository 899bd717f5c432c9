// Package locktest checks that the locks of fcntl(2) and flock(2) on a directory are like those of Linux's own file systems.
// Locks belong to processes, so the tests give commands to workers: processes that run the test binary again. A test package
// that uses this has
//
//	func TestLockWorker(t *testing.T) { locktest.Serve(t) }
package locktest

// Package sessions has a metadata service serve many clients, without mounts: what each of them costs it in memory, and how long all
// of them take to be back after it was killed. The figures are printed; the bounds in the tests are far above what is usual.
//
//	ulimit -n 120000; go test -v ./test/sessions -args -sessions 5000
//
// All sessions come from one address, which has an eighth of the connections that the limit on descriptors allows.
package sessions

// Package sessions has a metadata service serve many clients, without mounts: what each of them costs it in memory, and how long all
// of them take to be back after it was killed. The figures are printed; the bounds in the tests are far above what is usual.
//
//	go test -v ./test/sessions -args -sessions 5000
package sessions

// Package interop holds our programs against those of others: NFS-Ganesha as a data server, and the Linux kernel's clients in
// the virtual machine of test/lab (scripts/test --lab).
package interop

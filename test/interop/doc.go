// Package interop holds our programs against the Linux kernel's, in the virtual machine of test/lab: run it with
// scripts/test --lab.
package interop

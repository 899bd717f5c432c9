// Package posix asks what system calls answer: a table of more than 4,000 checks, each a function that works in an empty
// directory, run on a weft mount, on ext4 and on tmpfs. Answers are text, such as errnos, numbers and contents, and must be those
// of the table and of each other; the differences that are right are listed with their reasons, here and in docs/posix.md.
//
// Cross checks change something through one mount and look at once through another mount of the same volume. The same
// checks run on a local directory that is bound twice, which shows that they ask the right thing.
//
// Users are threads with credentials of their own, which the kernel tells from processes in nothing that matters here.
// Helper processes are this test binary again (child_test.go): owners of locks, and users of mappings, which may die of it.
// The tests run in a mount namespace of their own, so that nothing they mount stays.
package posix

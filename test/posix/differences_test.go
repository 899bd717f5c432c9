package posix

// differences are known and justified; docs/posix.md lists the same.
var differences = []difference{
	{"ext4", "times after setxattr to the same (file), file", "ext4 sees that the value is the same and changes nothing"},
}

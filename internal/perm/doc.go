// Package perm decides who may use an inode for what, as the Linux VFS decides it (fs/namei.c, fs/attr.c, fs/xattr.c,
// fs/posix_acl.c), so that an application sees the same errno on weft as on a local file system. It decides from
// values and keeps nothing. The caller has read the attributes and, if Caller.Asks, the access control list.
//
// It also has POSIX access control lists as Linux has them (acl(5), the withdrawn POSIX 1003.1e draft 17). Their form
// is that of the extended attributes system.posix_acl_access and system.posix_acl_default. The package says what a list
// permits, how lists and mode bits follow each other, and what a new inode inherits.
package perm

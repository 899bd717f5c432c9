// Package perm decides who may use an inode for what, as the Linux VFS decides it (fs/namei.c, fs/attr.c, fs/xattr.c,
// fs/posix_acl.c), so that an application sees the same errno on weft as on a local file system. It decides from values: it
// keeps nothing, and whoever asks has read the attributes and, if Caller.Asks, the access control list.
//
// It also has POSIX access control lists (acl(5), the withdrawn POSIX 1003.1e draft 17) as Linux has them: their form as
// extended attributes system.posix_acl_access and system.posix_acl_default, whom they let do what, how they and the mode
// bits follow each other, and what a new inode inherits.
package perm

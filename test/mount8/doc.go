// Package mount8 has tests of weft as mount(8), umount(8), fstab(5) and systemd use it, and of what weft install makes for them.
package mount8

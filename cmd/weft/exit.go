package main

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/cli"
)

// Exit codes of weft. Those of mount and umount are mount(8)'s.
const (
	exitUsage       = 1  // the command line is wrong, or one has to be root
	exitFailed      = 2  // it was right, but could not be done; of mount and umount: the system has not what it takes
	exitDiffer      = 3  // of admin verify: copies of files differ
	exitInterrupted = 8  // mount or umount was interrupted
	exitMount       = 32 // mount or umount failed
)

func usagef(format string, args ...any) error { return cli.Usagef(format, args...) }

// mountErr gives an error of mount or umount its exit code.
func mountErr(err error) error {
	switch {
	case errors.Is(err, context.Canceled):
		return cli.Exit(exitInterrupted, err)
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return cli.Exit(exitFailed, err)
	}
	return cli.Exit(exitMount, err)
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
)

// Exit codes of weft. Those of mount and umount are mount(8)'s.
const (
	exitOK          = 0
	exitUsage       = 1  // the command line is wrong, or one has to be root
	exitFailed      = 2  // it was right, but could not be done; of mount and umount: the system has not what it takes
	exitDiffer      = 3  // of admin verify: copies of files differ
	exitInterrupted = 8  // mount or umount was interrupted
	exitMount       = 32 // mount or umount failed
)

// program is what messages begin with: weft, or the name that mount(8) has called.
var program = "weft"

// exitError ends the program with its code; the message goes to standard error, one line.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

func mountErr(err error) error {
	if e := (*exitError)(nil); err == nil || errors.As(err, &e) {
		return err
	}
	switch {
	case errors.Is(err, context.Canceled):
		return &exitError{exitInterrupted, err}
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return &exitError{exitFailed, err}
	}
	return &exitError{exitMount, err}
}

// oneLine is the message of err; errors that are joined are on lines of their own otherwise. Names in it are quoted,
// except for those that come from elsewhere, which at least a terminal does not obey.
func oneLine(err error) string { return filename.Escape(strings.ReplaceAll(err.Error(), "\n", "; ")) }

// exitCode prints err, if any, and says what to exit with.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	fmt.Fprintf(os.Stderr, "%s: %s\n", program, oneLine(err))
	if e := (*exitError)(nil); errors.As(err, &e) {
		return e.code
	}
	return exitFailed
}

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// Exit codes of weft. Those of mount and umount are mount(8)'s.
const (
	exitOK     = 0
	exitUsage  = 1  // the command line is wrong
	exitFailed = 2  // it was right, but could not be done
	exitMount  = 32 // mount or umount failed
)

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
	return &exitError{exitMount, err}
}

// oneLine is the message of err; errors that are joined are on lines of their own otherwise.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// exitCode prints err, if any, and says what to exit with.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	fmt.Fprintf(os.Stderr, "weft: %s\n", oneLine(err))
	if e := (*exitError)(nil); errors.As(err, &e) {
		return e.code
	}
	return exitFailed
}

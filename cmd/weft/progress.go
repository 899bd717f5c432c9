package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	barTime  = time.Second / 5  // between two looks at a bar
	lineTime = 10 * time.Second // between lines where there is no terminal
)

// bar is a part of 1 as people see it.
func bar(part float64) string {
	const width = 20
	line := strings.Repeat("=", int(min(part, 1)*width))
	if len(line) < width {
		line += ">"
	}
	return fmt.Sprintf("[%-*s] %3.0f%%", width, line, 100*part)
}

// showUntil writes what state says to standard error until stop is called: in one line that changes on a terminal, elsewhere in a line now and then.
func showUntil(state func() string) (stop func()) {
	_, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS)
	every, format := lineTime, "%s\n"
	if err == nil {
		every, format = barTime, "\r%s\x1b[K"
	}
	over, done := make(chan struct{}), make(chan struct{})
	go func() { // ends with over
		defer close(done)
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				fmt.Fprintf(os.Stderr, format, state())
			case <-over:
				if err == nil {
					fmt.Fprintf(os.Stderr, format+"\n", state())
				}
				return
			}
		}
	}()
	return func() {
		close(over)
		<-done
	}
}

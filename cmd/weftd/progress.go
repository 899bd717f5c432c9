package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/server/meta/catalog/dump"
)

const (
	barTime  = 200 * time.Millisecond // between changes of the line on a terminal
	lineTime = 10 * time.Second       // between lines elsewhere
)

// progress shows on standard error how far a command is: on a terminal in a line that changes, elsewhere in one from time to time.
type progress struct {
	began, shown time.Time
	terminal     bool
}

func newProgress() *progress {
	_, err := unix.IoctlGetWinsize(int(os.Stderr.Fd()), unix.TIOCGWINSZ)
	return &progress{began: time.Now(), shown: time.Now(), terminal: err == nil}
}

// tell is called often. share is how much is done, 0 to 1; 0 if that is not known.
func (b *progress) tell(p dump.Progress, share float64) {
	every := lineTime
	if b.terminal {
		every = barTime
	}
	if now := time.Now(); now.Sub(b.shown) >= every {
		b.shown = now
		format := "%s\n"
		if b.terminal {
			format = "\r%s\x1b[K"
		}
		fmt.Fprintf(os.Stderr, format, progressLine(p, share, now.Sub(b.began), b.terminal))
	}
}

// end leaves the line that changes.
func (b *progress) end() {
	if b.terminal {
		fmt.Fprint(os.Stderr, "\r\x1b[K")
	}
}

// progressLine says how far it is after a time.
func progressLine(p dump.Progress, share float64, took time.Duration, terminal bool) string {
	var s strings.Builder
	share = min(share, 1)
	if terminal && share > 0 {
		const width = 20
		full := int(share * width)
		fmt.Fprintf(&s, "[%s%s] ", strings.Repeat("#", full), strings.Repeat("-", width-full))
	}
	if share > 0 {
		fmt.Fprintf(&s, "%3.0f%%  ", 100*share)
	}
	fmt.Fprintf(&s, "%d rows, %s, %s", p.Rows, humanize.IBytes(uint64(p.Bytes)), rates(p, took))
	if share > 0 && share < 1 {
		left := time.Duration(float64(took) * (1 - share) / share)
		fmt.Fprintf(&s, ", about %v left", max(time.Second, left.Round(time.Second)))
	}
	return s.String()
}

func rates(p dump.Progress, took time.Duration) string {
	seconds := max(took.Seconds(), 1e-3)
	return fmt.Sprintf("%.0f rows/s, %s/s", float64(p.Rows)/seconds, humanize.IBytes(uint64(float64(p.Bytes)/seconds)))
}

// summary says what was done.
func (b *progress) summary(p dump.Progress) string {
	took := time.Since(b.began)
	return fmt.Sprintf("%d rows, %s in %v, %s", p.Rows, humanize.IBytes(uint64(p.Bytes)), took.Round(10*time.Millisecond), rates(p, took))
}

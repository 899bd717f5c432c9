// Package progress shows on standard error how far a command is: on a terminal in a line that changes, elsewhere in a line from time to time, or as
// JSON for programs.
//
// # JSON
//
// With --progress json there is one object a second, in a line:
//
//	seconds     since the job began
//	share       how much is done, 0 to 1; missing if it is not known
//	left        seconds that are left, about; missing if that is not known
//	per_second  how fast it is, in what the first of counts counts
//	counts      objects with unit, done, and total, which is missing if it is not known: the first one is what share and left are of
//	doing       what is being done now; may be missing
//	waits_for   what it cannot go on without; may be missing
//
// # Locks
//
// Shown.mu is held while something is written, so that lines are whole. Nothing else is taken meanwhile.
package progress

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

const (
	barTime  = time.Second / 5  // between two looks at a bar
	jsonTime = time.Second      // between objects
	lineTime = 10 * time.Second // between lines where there is no terminal
	barWidth = 20
)

// Bytes is the unit of sizes.
const Bytes = "bytes"

// Count is how much there is of something, and how much of that is done.
type Count struct {
	Unit  string `json:"unit"` // Bytes, or what is counted, such as files
	Done  int64  `json:"done"`
	Total int64  `json:"total,omitempty"` // 0: not known
	More  bool   `json:"-"`               // there is more than Total
}

// State is how far a job is.
type State struct {
	Counts []Count
	Share  float64       // how much is done, 0 to 1, where Counts do not tell; 0: not known
	Rate   float64       // for each second, in the unit of the first count; 0: what was done so far, evenly
	Left   time.Duration // 0: follows from the rest
	Doing  string
	Waits  string
}

// share is how much is done, and whether that is known.
func (s *State) share() (float64, bool) {
	switch {
	case s.Share > 0:
		return min(1, s.Share), true
	case len(s.Counts) > 0 && s.Counts[0].Total > 0 && !s.Counts[0].More:
		return min(1, float64(s.Counts[0].Done)/float64(s.Counts[0].Total)), true
	}
	return 0, false
}

// rate is that of the first count, after a time.
func (s *State) rate(took time.Duration) float64 {
	switch {
	case s.Rate > 0:
		return s.Rate
	case len(s.Counts) > 0:
		return float64(s.Counts[0].Done) / max(took.Seconds(), 1e-3)
	}
	return 0
}

// left is how long it will take, about; 0 if that is not known.
func (s *State) left(took time.Duration) time.Duration {
	share, known := s.share()
	seconds := 0.0
	switch rate := s.rate(took); {
	case s.Left > 0 || !known || share == 1:
		return s.Left
	case s.Share == 0 && rate > 0: // by what is left
		seconds = float64(s.Counts[0].Total-s.Counts[0].Done) / rate
	case share > 0:
		seconds = took.Seconds() * (1 - share) / share
	}
	if seconds == 0 || seconds > 1e9 {
		return 0
	}
	return max(time.Second, time.Duration(seconds*float64(time.Second)).Round(time.Second))
}

func amount(unit string, n float64) string {
	if unit == Bytes {
		return humanize.IBytes(uint64(max(n, 0)))
	}
	return fmt.Sprintf("%.0f %s", n, unit)
}

// Line says for people how far it is after a time, on a terminal with a bar.
func (s *State) Line(took time.Duration, terminal bool) string {
	var b strings.Builder
	share, known := s.share()
	if terminal {
		full := int(share * barWidth)
		fmt.Fprintf(&b, "[%s%s] ", strings.Repeat("#", full), strings.Repeat("-", barWidth-full))
	}
	if known {
		fmt.Fprintf(&b, "%3.0f%%  ", 100*share)
	}
	var parts []string
	if s.Doing != "" {
		parts = append(parts, s.Doing)
	}
	for i, c := range s.Counts {
		part := amount(c.Unit, float64(c.Done))
		if more := map[bool]string{true: "+"}[c.More]; c.Total > 0 && c.Unit == Bytes {
			part += " of " + amount(c.Unit, float64(c.Total)) + more
		} else if c.Total > 0 {
			part = fmt.Sprintf("%d of %d%s %s", c.Done, c.Total, more, c.Unit)
		}
		parts = append(parts, part)
		if i > 0 {
			continue
		}
		if rate := s.rate(took); rate > 0 {
			parts = append(parts, amount(c.Unit, rate)+"/s")
		}
		if left := s.left(took); left > 0 {
			parts = append(parts, left.String()+" left")
		}
	}
	if left := s.left(took); left > 0 && len(s.Counts) == 0 {
		parts = append(parts, left.String()+" left")
	}
	if s.Waits != "" {
		parts = append(parts, "waits for "+s.Waits)
	}
	return b.String() + strings.Join(parts, ", ")
}

// object is what programs are told.
func (s *State) object(took time.Duration) any {
	o := struct {
		Seconds   float64  `json:"seconds"`
		Share     *float64 `json:"share,omitempty"`
		Left      float64  `json:"left,omitempty"`
		PerSecond float64  `json:"per_second"`
		Counts    []Count  `json:"counts"`
		Doing     string   `json:"doing,omitempty"`
		Waits     string   `json:"waits_for,omitempty"`
	}{Seconds: took.Seconds(), Left: s.left(took).Seconds(), PerSecond: s.rate(took), Counts: s.Counts, Doing: s.Doing, Waits: s.Waits}
	if share, known := s.share(); known {
		o.Share = &share
	}
	if o.Counts == nil {
		o.Counts = []Count{}
	}
	return o
}

// Form is how it is shown: auto, json or off.
type Form string

// Flag adds --progress to the flags of a command.
func Flag(fl *pflag.FlagSet) *Form {
	f := Form("auto")
	fl.Var(&f, "progress", "how to show on standard error how far it is: auto (a bar on a terminal, elsewhere a line now and then), json or off")
	return &f
}

// Set, Type and String make it a pflag.Value.
func (f *Form) Set(s string) error {
	switch s {
	case "auto", "json", "off":
		*f = Form(s)
		return nil
	}
	return fmt.Errorf("%q: want auto, json or off", s)
}

func (f *Form) Type() string { return "FORM" }

func (f *Form) String() string { return string(*f) }

// Shown is a job that is being shown.
type Shown struct {
	form  Form
	state func() State
	began time.Time

	mu         sync.Mutex
	over, done chan struct{}
}

// Show begins to show what state says, which any goroutine may be asked for, until Stop.
func Show(form Form, state func() State) *Shown {
	s := &Shown{form: form, state: state, began: time.Now(), over: make(chan struct{}), done: make(chan struct{})}
	go s.run() // ends with Stop
	return s
}

// Took is for how long it has been shown.
func (s *Shown) Took() time.Duration { return time.Since(s.began) }

// Stop ends it, on a terminal without a trace.
func (s *Shown) Stop() {
	close(s.over)
	<-s.done
}

// Print writes a line to standard error, of something else than how far it is.
func (s *Shown) Print(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := width(); ok && s.form == "auto" {
		line = clearLine + line
	}
	fmt.Fprintln(os.Stderr, line)
}

// clearLine makes room in a terminal's line.
const clearLine = "\r\x1b[K"

func (s *Shown) run() {
	defer close(s.done)
	_, terminal := width()
	every := lineTime
	switch {
	case s.form == "off":
		<-s.over
		return
	case s.form == "json":
		every, terminal = jsonTime, false
	case terminal:
		every = barTime
		s.tell(true)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.tell(terminal)
		case <-s.over:
			switch {
			case s.form == "json":
				s.tell(false)
			case terminal:
				fmt.Fprint(os.Stderr, clearLine)
			}
			return
		}
	}
}

func (s *Shown) tell(terminal bool) {
	state, took := s.state(), s.Took()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.form == "json":
		json.NewEncoder(os.Stderr).Encode(state.object(took))
	case terminal:
		line := []rune(state.Line(took, true))
		if columns, ok := width(); ok && len(line) >= columns {
			line = line[:max(0, columns-1)]
		}
		fmt.Fprint(os.Stderr, clearLine, string(line))
	default:
		fmt.Fprintln(os.Stderr, state.Line(took, false))
	}
}

// width is how wide the terminal is that standard error goes to, if it does to one.
func width() (int, bool) {
	ws, err := unix.IoctlGetWinsize(int(os.Stderr.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, false
	}
	if ws.Col == 0 {
		return 80, true
	}
	return int(ws.Col), true
}

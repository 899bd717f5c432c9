package main

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Turns: this build against others.
//
// The speed of a shared machine changes by tens of percent from one minute to the next, so a run of one
// build and then one of another do not show a difference of five percent. With --against a process of each
// build measures the same row: they set up at the same time, and measure many times in turn, a second or
// less at a time. What is compared are the turns next to each other. A process can be faster than another
// one of the same build for as long as it lives, by ten percent, so it is run several times. The row's
// baseline is not measured.
//
// The program that was called has each build's bench do so (takeFlag). On descriptor turnGo that one reads
// a byte for each turn. On turnSaid it writes a line when it is ready, and then for each turn one with its
// operations per second and the processor time of an operation, in seconds.

const (
	takeFlag = "take-turns" // with how many turns
	turnGo   = 3
	turnSaid = 4
)

// turns are those that this process takes; nil: it measures every figure once.
var turns *turnTaker

type turnTaker struct {
	n    int
	skip int // figures that are measured once before
	in   *bufio.Reader
	said *os.File
}

func takeTurns(n, skip int) *turnTaker {
	sample = turnTime
	return &turnTaker{n: n, skip: skip, in: bufio.NewReader(os.NewFile(turnGo, "turns")), said: os.NewFile(turnSaid, "said")}
}

// errTurnsOver ends a row when its figure has been measured.
var errTurnsOver = errors.New("all turns were taken")

// turnTime is how long a turn takes where that can be chosen.
const turnTime = time.Second

// A turn is one measurement of a figure.
type turn struct {
	index int
	busy  float64 // of all processors, in seconds, when it began
}

// begin is called when what has to be prepared for the turn is there.
func (t *turn) begin() (err error) {
	t.busy, err = busyTime()
	return err
}

// busyTime is how long the machine's processors have been busy, in seconds.
func busyTime() (float64, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	sum := 0.0
	for i, field := range strings.Fields(line)[1:8] {
		v, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		if i != 3 && i != 4 { // idle, waiting for I/O
			sum += v / 100 // USER_HZ
		}
	}
	return sum, nil
}

// inTurns measures a figure: one does so, and returns it with the operations that it did and how long they took.
func inTurns(one func(t *turn) (figure, ops float64, took time.Duration, err error)) (figure float64, err error) {
	if turns == nil || turns.skip > 0 {
		if turns != nil {
			turns.skip--
		}
		figure, _, _, err = one(&turn{})
		return figure, err
	}
	if _, err := fmt.Fprintln(turns.said, "ready"); err != nil {
		return 0, err
	}
	for i := range turns.n {
		if err := turns.take(i, one); err != nil {
			return 0, fmt.Errorf("turn %d: %w", i, err)
		}
	}
	return 0, errTurnsOver
}

// take measures once, when it is told to, and says what came of it.
func (tt *turnTaker) take(i int, one func(*turn) (figure, ops float64, took time.Duration, err error)) error {
	if _, err := tt.in.ReadByte(); err != nil {
		return err
	}
	t := &turn{index: i}
	if err := t.begin(); err != nil {
		return err
	}
	_, ops, took, err := one(t)
	if err != nil {
		return err
	}
	busy, err := busyTime()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(tt.said, ops/took.Seconds(), (busy-t.busy)/ops)
	return err
}

// A build is a process that takes turns.
type build struct {
	dir string // its checkout
	cmd *exec.Cmd
	do  *os.File
	in  *bufio.Reader
	out strings.Builder // what it says to people
	// Of its turns so far.
	rate, cpu []float64
}

func startBuild(dir, row string, n int) (b *build, err error) {
	bench := filepath.Join(dir, "bin/bench")
	if _, err := os.Stat(bench); err != nil {
		return nil, fmt.Errorf("%w: run scripts/bench --list in that checkout, which builds it", err)
	}
	b = &build{dir: dir, cmd: exec.Command(bench, row, "--"+takeFlag, fmt.Sprint(n))}
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	saidRead, saidWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	b.cmd.ExtraFiles = []*os.File{goRead, saidWrite}
	b.cmd.Stdout, b.cmd.Stderr = &b.out, &b.out
	b.do, b.in = goWrite, bufio.NewReader(saidRead)
	err = b.cmd.Start()
	return b, errors.Join(err, goRead.Close(), saidWrite.Close())
}

// turn has it measure once.
func (b *build) turn() error {
	if _, err := b.do.Write([]byte{1}); err != nil {
		return err
	}
	line, err := b.in.ReadString('\n')
	if err != nil {
		return err
	}
	var rate, cpu float64
	if _, err := fmt.Sscan(line, &rate, &cpu); err != nil {
		return fmt.Errorf("%s: %q: %w", b.dir, line, err)
	}
	b.rate, b.cpu = append(b.rate, rate), append(b.cpu, cpu)
	return nil
}

// end lets it end, and returns the error with which it does, with what it said.
func (b *build) end() error {
	if err := errors.Join(b.do.Close(), b.cmd.Wait()); err != nil {
		return fmt.Errorf("%s: %w: %s", b.dir, err, b.out.String())
	}
	return nil
}

// against measures a row of this build and of others, and prints for each other build how many times its
// operations this one does in a second: the median of all pairs of turns, and the mean with its standard
// error. The last number compares the processor time of an operation.
func against(row, own string, others []string, n int) (err error) {
	var builds []*build
	defer func() {
		for _, b := range builds {
			err = errors.Join(err, b.end())
		}
	}()
	for _, dir := range append([]string{own}, others...) {
		b, err := startBuild(dir, row, n)
		if err != nil {
			return err
		}
		builds = append(builds, b)
	}
	for _, b := range builds {
		if _, err := b.in.ReadString('\n'); err != nil {
			return fmt.Errorf("%s: it takes no turns at this row: %w", b.dir, err)
		}
	}
	for i := range n {
		for k := range builds {
			if err := builds[(i+k)%len(builds)].turn(); err != nil {
				return err
			}
		}
	}
	for _, b := range builds[1:] {
		m, se := mean(ratios(builds[0].rate, b.rate))
		fmt.Printf("%-28s %8.0f/s  against %-12s median %.3f  mean %.3f +- %.3f  processor time %.3f\n", row,
			median(builds[0].rate), filepath.Base(b.dir), median(ratios(builds[0].rate, b.rate)), m, se, sum(builds[0].cpu)/sum(b.cpu))
	}
	return nil
}

func ratios(a, b []float64) []float64 {
	r := slices.Clone(a)
	for i := range r {
		r[i] /= b[i]
	}
	return r
}

func sum(v []float64) (s float64) {
	for _, x := range v {
		s += x
	}
	return s
}

// mean returns the mean and its standard error.
func mean(v []float64) (m, se float64) {
	n := float64(len(v))
	m = sum(v) / n
	for _, x := range v {
		se += (x - m) * (x - m)
	}
	return m, math.Sqrt(se / (n - 1) / n)
}

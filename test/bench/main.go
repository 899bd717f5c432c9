package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// A bench is one row: it measures weft and a baseline once, in the same unit.
type bench struct {
	name     string
	unit     string
	baseline string
	goal     goal
	durable  bool   // print the disk's floor
	third    string // what there is a third figure of; empty: nothing
	guest    bool   // measured in the virtual machine of test/lab: only when named
	skip     int    // figures that are measured before the one that builds are compared by
	measure  func(*lab) (figures, error)
}

// goal is what the ratio should be; the zero goal is none.
type goal struct {
	op    string // ">=" or "<="
	value float64
}

func atLeast(v float64) goal { return goal{">=", v} }
func atMost(v float64) goal  { return goal{"<=", v} }

func (g goal) met(ratio float64) bool {
	return g.op == ">=" && ratio >= g.value || g.op == "<=" && ratio <= g.value
}

// figures of one repeat.
type figures struct {
	weft, baseline, disk float64
}

// row is a line of --json.
type row struct {
	Bench         string   `json:"bench"`
	Value         float64  `json:"value"`
	Unit          string   `json:"unit"`
	Baseline      string   `json:"baseline"`
	BaselineValue float64  `json:"baseline_value"`
	Ratio         float64  `json:"ratio"`
	Goal          *float64 `json:"goal"` // null: none is set
	GoalOp        string   `json:"goal_op"`
	Met           *bool    `json:"met"`
	Runs          int      `json:"runs"`
	RatioMin      float64  `json:"ratio_min"`
	RatioMax      float64  `json:"ratio_max"`
	Disk          float64  `json:"local_disk,omitempty"`      // the local disk's file system, same unit
	Floor         float64  `json:"fdatasync_per_s,omitempty"` // of the disk the volume is on
}

func main() {
	do := run
	if len(os.Args) > 1 {
		for name, command := range map[string]func([]string) error{
			bareCommand: serveBare, dataCommand: serveData, filesCommand: serveFiles, nvmeCommand: serveNVMe, loadCommand: loadNVMe,
		} {
			if os.Args[1] == name {
				do = func() error { return command(os.Args[2:]) }
			}
		}
	}
	if err := do(); err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	fl := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	fl.Usage = func() {
		fmt.Printf("Usage: scripts/bench [NAME...] [--json FILE] [--runs N]\n\n%s\nRows:\n", fl.FlagUsages())
		list()
	}
	jsonFile := fl.String("json", "", "also write one JSON object a row to this file")
	runs := fl.Int("runs", 3, "alternating repeats, at least 3")
	others := fl.StringArray("against", nil, "compare this build with that of another checkout, built by scripts/bench, turn by turn; may be repeated")
	count := fl.Int("turns", 15, "with --against: of each build, at least 3")
	taken := fl.Int(takeFlag, 0, "")
	fl.MarkHidden(takeFlag)
	names := fl.Bool("list", false, "list the rows with their goals, and nothing else")
	if err := fl.Parse(os.Args[1:]); err != nil {
		return err
	}
	if *names {
		list()
		return nil
	}
	if *runs < 3 {
		return fmt.Errorf("--runs %d: a median wants at least 3", *runs)
	}
	chosen := slices.DeleteFunc(slices.Clone(benches), func(b bench) bool { return b.guest })
	if fl.NArg() > 0 {
		chosen = nil
		for _, name := range fl.Args() {
			i := slices.IndexFunc(benches, func(b bench) bool { return b.name == name })
			if i < 0 {
				return fmt.Errorf("no row %q; see scripts/bench --help", name)
			}
			chosen = append(chosen, benches[i])
		}
	}
	for _, f := range []string{"json", "runs"} {
		if len(*others) > 0 && fl.Changed(f) {
			return fmt.Errorf("--%s: not with --against", f)
		}
	}
	if len(*others) == 0 && fl.Changed("turns") {
		return errors.New("--turns: only with --against")
	}
	if *count < 3 {
		return fmt.Errorf("--turns %d: a mean wants at least 3", *count)
	}
	if len(*others) > 0 {
		return againstAll(chosen, *others, *count)
	}
	if *taken > 0 {
		turns, *runs = takeTurns(*taken, chosen[0].skip), 1
	}
	var out *os.File
	if *jsonFile != "" {
		if out, err = os.Create(*jsonFile); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, out.Close()) }()
	}
	l, err := newLab()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	fmt.Printf("%-24s %12s  %-28s %12s  %6s  %-13s %s\n", "bench", "weft", "baseline", "figure", "ratio", "spread", "also")
	for _, b := range chosen {
		r, err := b.run(l, *runs)
		if err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
		var also []string
		if r.Goal != nil {
			also = append(also, fmt.Sprintf("goal %s %g: %s", r.GoalOp, *r.Goal, map[bool]string{true: "met", false: "missed"}[*r.Met]))
		}
		if b.third != "" {
			also = append(also, fmt.Sprintf("%s %s", b.third, number(r.Disk, b.unit)))
		}
		if b.durable {
			also = append(also, fmt.Sprintf("fdatasync floor %.0f/s", r.Floor))
		}
		fmt.Printf("%-24s %12s  %-28s %12s  %6.2f  %.2f to %.2f  %s\n", r.Bench, number(r.Value, r.Unit), r.Baseline, number(r.BaselineValue, r.Unit),
			r.Ratio, r.RatioMin, r.RatioMax, strings.Join(also, ", "))
		if out != nil {
			if err := json.NewEncoder(out).Encode(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// againstAll compares this build with others.
func againstAll(chosen []bench, others []string, n int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, b := range chosen {
		if err := against(b.name, filepath.Dir(filepath.Dir(self)), others, n); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
	}
	return nil
}

func list() {
	for _, b := range benches {
		fmt.Printf("  %-26s %s, against %s", b.name, b.unit, b.baseline)
		if b.goal.op != "" {
			fmt.Printf(", ratio %s %g", b.goal.op, b.goal.value)
		}
		if b.guest {
			fmt.Print(", only when named: in the virtual machine of test/lab")
		}
		fmt.Println()
	}
}

func number(v float64, unit string) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f %s", v, unit)
	}
	return fmt.Sprintf("%.2f %s", v, unit)
}

func (b bench) run(l *lab, runs int) (row, error) {
	var weft, base, disk, floor, ratio []float64
	for range runs {
		f, err := b.measure(l)
		if errors.Is(err, errTurnsOver) {
			err, f.baseline = nil, 1
		}
		if err != nil {
			return row{}, err
		}
		if b.durable && turns == nil {
			n, err := l.floor()
			if err != nil {
				return row{}, err
			}
			floor = append(floor, n)
		}
		weft, base, disk = append(weft, f.weft), append(base, f.baseline), append(disk, f.disk)
		ratio = append(ratio, f.weft/f.baseline)
	}
	r := row{
		Bench: b.name, Value: median(weft), Unit: b.unit, Baseline: b.baseline, BaselineValue: median(base),
		Ratio: median(ratio), Runs: runs, RatioMin: slices.Min(ratio), RatioMax: slices.Max(ratio), Disk: median(disk),
	}
	if floor != nil {
		r.Floor = median(floor)
	}
	if b.goal.op != "" {
		met := b.goal.met(r.Ratio)
		r.Goal, r.GoalOp, r.Met = &b.goal.value, b.goal.op, &met
	}
	return r, nil
}

func median(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2
}

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/dustin/go-humanize"
	"github.com/pkg/xattr"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// layoutXattr is a directory's layout policy.
const layoutXattr = "weft.layout"

// fileLayout is the form of `weft layout FILE --json`.
type fileLayout struct {
	File        filename.JSON  `json:"file"`
	Size        int64          `json:"size"`
	StripeUnit  int64          `json:"stripe_unit"`
	StripeCount int            `json:"stripe_count"`
	Mirrors     []layoutMirror `json:"mirrors"`
	Caches      []layoutCache  `json:"caches"`
}

// layoutCache is a copy of the whole file for readers.
type layoutCache struct {
	Device   string `json:"device"`
	Address  string `json:"address"`
	DataFile string `json:"data_file"`
	State    string `json:"state"` // cached, filling or dropped
	Bytes    int64  `json:"bytes"`
}

type layoutMirror struct {
	Servers []layoutServer `json:"servers"`
}

type layoutServer struct {
	Index    int    `json:"index"`
	Device   string `json:"device"`
	Address  string `json:"address"`
	DataFile string `json:"data_file"`
}

// describe turns the service's answer into what is printed.
func describe(d metarpc.Described) fileLayout {
	l := fileLayout{StripeUnit: d.StripeUnit, Mirrors: []layoutMirror{}, Caches: []layoutCache{}}
	for _, servers := range d.Mirrors {
		m := layoutMirror{Servers: []layoutServer{}}
		for i, s := range servers {
			server := layoutServer{Index: i, Address: s.Address, DataFile: s.DataFile}
			if s.Device != (layout.DeviceID{}) { // none is chosen before there is data for it
				server.Device = s.Device.String()
			}
			m.Servers = append(m.Servers, server)
		}
		l.StripeCount = len(m.Servers)
		l.Mirrors = append(l.Mirrors, m)
	}
	states := map[layout.CopyState]string{layout.CopyGood: "cached", layout.CopyFilling: "filling", layout.CopyStale: "dropped"}
	for _, c := range d.Caches {
		l.Caches = append(l.Caches, layoutCache{c.Server.Device.String(), c.Server.Address, c.Server.DataFile, states[c.State], c.Bytes})
	}
	return l
}

// dirPolicy is the form of `weft layout DIR --json`.
type dirPolicy struct {
	Directory   filename.JSON `json:"directory"`
	StripeUnit  int64         `json:"stripe_unit"`
	StripeCount int           `json:"stripe_count"`
	Mirrors     int           `json:"mirrors"`
	Placement   string        `json:"placement"`
	MinCopies   int           `json:"min_copies"`
}

func runLayout(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	asJSON := fl.Bool("json", false, "print one JSON object")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	path := fl.Arg(0)
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return showPolicy(path, *asJSON)
	case unix.S_IFREG:
	default:
		return fmt.Errorf("%s: only regular files and directories have a layout", filename.Quote(path))
	}
	m, err := mountOf(st.Dev)
	if err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	var l fileLayout
	if err := control(ctx, m, controlRequest{Op: "layout", File: layout.FileID(st.Ino)}, &l); err != nil {
		return err
	}
	l.File, l.Size = filename.JSON(path), st.Size
	if *asJSON {
		return json.NewEncoder(os.Stdout).Encode(l)
	}
	fmt.Printf("%s: %s, stripe unit %s, %d data servers in each of %d mirrors\n",
		filename.Quote(path), humanize.IBytes(uint64(l.Size)), humanize.IBytes(uint64(l.StripeUnit)), l.StripeCount, len(l.Mirrors))
	for i, m := range l.Mirrors {
		for _, s := range m.Servers {
			if s.DataFile == "" {
				what := "no data yet"
				if slices.ContainsFunc(l.Mirrors, func(m layoutMirror) bool { return m.Servers[s.Index].DataFile != "" }) {
					what = "a copy that is to be made"
				}
				fmt.Printf("  mirror %d server %d: %s\n", i, s.Index, what)
				continue
			}
			fmt.Printf("  mirror %d server %d: device %.8s  %s  %s\n", i, s.Index, s.Device, s.Address, s.DataFile)
		}
	}
	for _, c := range l.Caches {
		fmt.Printf("  %s: device %.8s  %s  %s\n", c.State, c.Device, c.Address, c.DataFile)
	}
	return nil
}

func showPolicy(path string, asJSON bool) error {
	value, err := xattr.Get(path, layoutXattr)
	if err != nil {
		return notWeft(path, err)
	}
	p, err := layout.ParsePolicy(string(value))
	if err != nil {
		return err
	}
	p = p.Or(layout.Policy{Placement: layout.PlacementSpread, MinCopies: 1})
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(dirPolicy{filename.JSON(path), p.StripeUnit, p.StripeCount, p.Mirrors, p.Placement.String(), p.MinCopies})
	}
	fmt.Printf("%s: new files get stripe unit %s, stripe count %d, mirrors %d, min copies %d, placement %v\n",
		filename.Quote(path), humanize.IBytes(uint64(p.StripeUnit)), p.StripeCount, p.Mirrors, p.MinCopies, p.Placement)
	return nil
}

func runLayoutSet(_ context.Context, c *command, args []string) error {
	fl := c.Flags("\nWhat is not given stays as it is. Directories made below inherit it; files that exist keep their layout.\n")
	unit := fl.String("stripe-unit", "", "bytes on one data server before the next one's turn, a multiple of 4KiB")
	count := fl.Int("stripe-count", 0, "data servers a file is striped over")
	mirrors := fl.Int("mirrors", 0, "copies of each file, on different data servers")
	least := fl.Int("min-copies", 0, "new files are made if there are data servers for so many copies, and get the others later; what is\nsynced is at so many good copies (default 1)")
	placement := fl.String("placement", "", "local: a file lies, unstriped, on a data server on the host of whoever writes it first, further copies elsewhere;\nspread: on all data servers in turn")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	var p layout.Policy
	if *unit != "" {
		n, err := humanize.ParseBytes(*unit)
		if err != nil || n == 0 || n > layout.MaxStripeUnit {
			return usagef("layout set: --stripe-unit %q is not a size such as 1MiB, at most %s", *unit, humanize.IBytes(layout.MaxStripeUnit))
		}
		p.StripeUnit = int64(n)
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"stripe-count", *count}, {"mirrors", *mirrors}, {"min-copies", *least}} {
		if fl.Changed(f.name) && f.value < 1 {
			return usagef("layout set: --%s %d: want at least 1", f.name, f.value)
		}
	}
	p.StripeCount, p.Mirrors, p.MinCopies = *count, *mirrors, *least
	if *placement != "" {
		var err error
		if p.Placement, err = layout.ParsePlacement(*placement); err != nil {
			return usagef("layout set: --%v", err)
		}
	}
	if p == (layout.Policy{}) {
		return usagef("layout set: nothing to set; give --stripe-unit, --stripe-count, --mirrors, --min-copies or --placement")
	}
	if err := p.Validate(); err != nil {
		return usagef("layout set: %v", err)
	}
	path := fl.Arg(0)
	if st, err := os.Stat(path); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), errnoOf(err))
	} else if !st.IsDir() {
		return fmt.Errorf("%s: not a directory; a file keeps the layout it was made with", filename.Quote(path))
	}
	value, err := xattr.Get(path, layoutXattr)
	if err != nil {
		return notWeft(path, err)
	}
	old, err := layout.ParsePolicy(string(value))
	if err != nil {
		return err
	}
	p = p.Or(old)
	if err := p.Validate(); err != nil {
		return usagef("layout set: with what is set already: %v", err)
	}
	err = xattr.Set(path, layoutXattr, []byte(p.String()))
	if e := errnoOf(err); p.MinCopies != 0 && (e == unix.ENOTSUP || e == unix.EINVAL) {
		return fmt.Errorf("%s: %w: a metadata service of the volume does not know --min-copies; weft admin meta ls shows their versions, upgrade weftd there first", filename.Quote(path), e)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), errnoOf(err))
	}
	return nil
}

// notWeft explains why a path has no layout attribute.
func notWeft(path string, err error) error {
	if e := errnoOf(err); e == unix.ENOTSUP || e == unix.ENODATA {
		return fmt.Errorf("%s: not on a weft mount", filename.Quote(path))
	}
	return fmt.Errorf("%s: %w", filename.Quote(path), errnoOf(err))
}

// errnoOf strips what pkg/xattr wraps around an errno.
func errnoOf(err error) error {
	var e unix.Errno
	if errors.As(err, &e) {
		return e
	}
	return err
}

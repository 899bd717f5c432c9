package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/cli"
	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// verifyRange is what a serving process is asked to have compared.
type verifyRange struct {
	Off    int64 `json:"off"`
	Len    int64 `json:"len"`
	Repair bool  `json:"repair,omitempty"`
}

// verifyState is the answer; see metarpc.VerifyResult.
type verifyState struct {
	Next     int64              `json:"next"`
	Size     int64              `json:"size"`
	Copies   int                `json:"copies"`
	Stale    bool               `json:"stale"`
	Differ   []verifyDifference `json:"differ"`
	Repaired bool               `json:"repaired"`
}

type verifyDifference struct {
	Off      int64    `json:"off"`
	Len      int64    `json:"len"`
	Majority bool     `json:"majority"`
	Good     []string `json:"good"` // URLs of data servers
	Bad      []string `json:"bad"`
}

func (d *verifyDifference) String() string {
	which := strings.Join(d.Good, ", ") + " agree, and not "
	if !d.Majority {
		which = "nobody knows which is right: the first one is " + strings.Join(d.Good, ", ") + ", other than "
	}
	return fmt.Sprintf("%d bytes at %d differ: %s%s", d.Len, d.Off, which, strings.Join(d.Bad, ", "))
}

// verify answers a request to compare copies, on behalf of whoever has mounted the file system.
func (d *daemon) verify(ctx context.Context, file layout.FileID, r verifyRange) (*verifyState, error) {
	v, err := d.meta.Verify(ctx, self(), &metarpc.VerifyArgs{ID: file, Off: r.Off, Len: r.Len, Repair: r.Repair})
	if err != nil {
		return nil, err
	}
	st := &verifyState{Next: v.Next, Size: v.Size, Copies: v.Copies, Stale: v.Stale, Repaired: v.Repaired}
	if len(v.Differ) == 0 {
		return st, nil
	}
	infos, err := d.meta.Devices(ctx)
	if err != nil {
		return nil, err
	}
	names := func(refs []metarpc.CopyRef) (urls []string) {
		for _, ref := range refs {
			url := ref.Device.String()
			for i := range infos {
				if infos[i].Device.ID == ref.Device {
					url = infos[i].URL
				}
			}
			urls = append(urls, url)
		}
		return urls
	}
	for _, f := range v.Differ {
		st.Differ = append(st.Differ, verifyDifference{Off: f.Off, Len: f.Len, Majority: f.Majority, Good: names(f.Good), Bad: names(f.Bad)})
	}
	return st, nil
}

// verifier compares the copies of files, one after the other.
type verifier struct {
	mount  mountEntry
	repair bool
	rate   uint64 // bytes per second, 0: as fast as it goes
	shown  *progress.Shown

	mu       sync.Mutex
	progress verifyProgress
}

// verifyProgress is how far all of it is.
type verifyProgress struct {
	files, bytes     int64 // all that there are
	counted          bool  // files and bytes are all
	looked, mirrored int64 // files that have been dealt with, and those with several copies
	done, compared   int64 // bytes of these files, and those of which there were several copies
	differ, failed   int64 // files
	stale            int64
	repaired         int64
}

func runVerify(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe copies of a mirrored file, or of all files below a directory (by default the current one), are compared while the files are in use: writers wait for\n" +
		"the range that is being compared, 4 MiB at most. Each place where they differ is named, with the data servers that have what most copies have, and those\n" +
		"that have not. Two copies that differ have no majority. With --repair the copies that disagree are made anew from the others, without a majority from\n" +
		"the first one; weft admin resilver waits for that. Copies that are already known to be out of date are not compared. It takes whoever has mounted the file\n" +
		"system, with the right to change the volume. Exit codes: 0 all copies are the same, 3 some differ, repaired or not, 2 not all could be compared.\n")
	repair := fl.Bool("repair", false, "have copies made anew that are not as the others are")
	rate := fl.String("rate", "", "compare so many bytes of files per second at most, such as 100MiB")
	form := progress.Flag(fl)
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	path := "."
	if fl.NArg() > 0 {
		path = fl.Arg(0)
	}
	v := &verifier{repair: *repair}
	if *rate != "" {
		var err error
		if v.rate, err = humanize.ParseBytes(*rate); err != nil || v.rate == 0 {
			return usagef("admin verify: --rate %q: want a size such as 100MiB", *rate)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	var err error
	if v.mount, err = mountOf(st.Dev); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	v.shown = progress.Show(*form, func() progress.State {
		p := v.now()
		return progress.State{Counts: []progress.Count{
			{Unit: progress.Bytes, Done: p.done, Total: p.bytes, More: !p.counted},
			{Unit: "files", Done: p.looked, Total: p.files, More: !p.counted},
		}}
	})
	return v.all(ctx, path, st.Dev)
}

// all compares all files below path.
func (v *verifier) all(ctx context.Context, path string, dev uint64) error {
	var counting sync.WaitGroup
	counting.Go(func() { // ends when all is counted, or with ctx; errors are the other walk's
		walk(ctx, path, dev, func(f fileToMove) {
			v.add(func(p *verifyProgress) { p.files++; p.bytes += f.size })
		}, func(error) {})
		v.add(func(p *verifyProgress) { p.counted = true })
	})
	walk(ctx, path, dev, func(f fileToMove) { v.one(ctx, f) }, v.fail)
	counting.Wait()
	v.shown.Stop()
	p := v.now()
	fmt.Printf("%d files compared, %s in %v", p.mirrored, humanize.IBytes(uint64(p.compared)), v.shown.Took().Round(100*time.Millisecond))
	single := p.looked - p.mirrored - p.failed
	also(os.Stdout, single > 0, "; %d have one copy, or no data", single)
	also(os.Stdout, p.stale > 0, "; %d have copies that are being made anew", p.stale)
	also(os.Stdout, p.differ > 0, "; %d have copies that differ", p.differ)
	also(os.Stdout, p.repaired > 0, "; %d of these are repaired", p.repaired)
	also(os.Stdout, p.failed > 0, "; %d could not be compared", p.failed)
	fmt.Println()
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case p.differ > 0:
		return cli.Exit(exitDiffer, fmt.Errorf("%d files have copies that differ", p.differ))
	case p.failed > 0:
		return fmt.Errorf("%d files could not be compared", p.failed)
	}
	return nil
}

// one compares the copies of a file.
func (v *verifier) one(ctx context.Context, f fileToMove) {
	began, compared := time.Now(), int64(0)
	mirrored, stale, differs, repaired := false, false, false, v.repair
	length := int64(metarpc.MaxVerify)
	if v.rate > 0 {
		length = max(64<<10, min(length, int64(v.rate/4)))
	}
	for off := int64(0); off < layout.ToEOF && ctx.Err() == nil; {
		var st verifyState
		err := control(ctx, v.mount, controlRequest{Op: "verify", File: f.id, Verify: &verifyRange{Off: off, Len: length, Repair: v.repair}}, &st)
		if errors.Is(err, unix.ESTALE) {
			break // it was removed meanwhile
		}
		if err != nil {
			if ctx.Err() == nil {
				v.fail(fmt.Errorf("%s: %w", filename.Quote(f.path), err))
				v.add(func(p *verifyProgress) { p.looked++ })
			}
			return
		}
		n := min(st.Next, st.Size) - min(off, st.Size)
		if off = st.Next; st.Copies > 1 {
			mirrored = true
			compared += n
			v.add(func(p *verifyProgress) { p.compared += n })
		}
		v.add(func(p *verifyProgress) { p.done += n })
		stale = stale || st.Stale && !differs
		for i := range st.Differ {
			v.shown.Print(fmt.Sprintf("%s: %s", filename.Quote(f.path), &st.Differ[i]))
		}
		if len(st.Differ) > 0 {
			differs, repaired = true, repaired && st.Repaired
		}
		if v.rate > 0 {
			pause := time.NewTimer(time.Until(began.Add(time.Duration(float64(compared) / float64(v.rate) * float64(time.Second)))))
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
			pause.Stop()
		}
	}
	v.add(func(p *verifyProgress) {
		p.looked++
		for _, is := range []struct {
			so bool
			n  *int64
		}{{mirrored, &p.mirrored}, {stale, &p.stale}, {differs, &p.differ}, {differs && repaired, &p.repaired}} {
			if is.so {
				*is.n++
			}
		}
	})
}

func (v *verifier) add(change func(*verifyProgress)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	change(&v.progress)
}

// fail says what could not be compared.
func (v *verifier) fail(err error) {
	v.add(func(p *verifyProgress) { p.failed++ })
	v.shown.Print("weft: " + filename.OneLine(err))
}

// now is how far it is.
func (v *verifier) now() verifyProgress {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.progress
}

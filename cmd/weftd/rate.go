package main

import (
	"fmt"
	"math"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"
)

// parseSize reads a size of at least so many bytes; 0 is none.
func parseSize(s string, least uint64) (int64, error) {
	if s == "" {
		return 0, nil
	}
	n, err := humanize.ParseBytes(s)
	if err != nil || n < least || n > math.MaxInt64 {
		return 0, fmt.Errorf("%q: want a size from %s on, such as 100GiB", s, humanize.IBytes(least))
	}
	return int64(n), nil
}

// rate is a number of bytes per second; 0 is no bound.
type rate int64

func rateFlag(fl *pflag.FlagSet) *rate {
	r := new(rate)
	fl.Var(r, "resilver-rate", "copies of mirrored data are made anew with so many bytes a second at most, such as 100MiB (default: no bound)")
	return r
}

func (r *rate) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil || n < 64<<10 || n > math.MaxInt64 {
		return fmt.Errorf("want a size from 64KiB on, such as 100MiB")
	}
	*r = rate(n)
	return nil
}

func (r *rate) Type() string { return "SIZE" }

func (r *rate) String() string {
	if *r == 0 {
		return ""
	}
	return humanize.IBytes(uint64(*r))
}

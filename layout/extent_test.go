package layout

import (
	"math"
	"strings"
	"testing"
)

func TestValidateExtents(t *testing.T) {
	for name, c := range map[string]struct {
		extents []Extent
		want    string // part of the message; empty: valid
	}{
		"none": {nil, ""},
		"all states": {[]Extent{
			{0, 4096, 1 << 30, ExtentReadWrite}, {4096, 512, 0, ExtentNone}, {4608, 512, 1 << 20, ExtentInvalid}, {8192, 512, 1 << 21, ExtentRead},
		}, ""},
		"to the end":          {[]Extent{{math.MaxInt64 - 1023, 512, 512, ExtentInvalid}}, ""},
		"beyond the end":      {[]Extent{{math.MaxInt64 - 511, 512, 512, ExtentInvalid}}, "extent 0"},
		"address beyond":      {[]Extent{{0, 512, math.MaxInt64 - 511, ExtentInvalid}}, "extent 0"},
		"empty":               {[]Extent{{0, 0, 512, ExtentRead}}, "0 bytes"},
		"negative length":     {[]Extent{{0, -512, 512, ExtentRead}}, "-512 bytes"},
		"negative offset":     {[]Extent{{-512, 512, 512, ExtentRead}}, "at -512"},
		"negative address":    {[]Extent{{0, 512, -512, ExtentRead}}, "namespace at -512"},
		"overlap":             {[]Extent{{0, 1024, 512, ExtentRead}, {512, 512, 4096, ExtentRead}}, "extent 1"},
		"out of order":        {[]Extent{{512, 512, 512, ExtentRead}, {0, 512, 4096, ExtentRead}}, "extent 1"},
		"odd offset":          {[]Extent{{1, 512, 512, ExtentRead}}, "multiples"},
		"odd length":          {[]Extent{{0, 511, 512, ExtentRead}}, "multiples"},
		"odd address":         {[]Extent{{0, 512, 513, ExtentRead}}, "multiples"},
		"state":               {[]Extent{{0, 512, 512, extentStateEnd}}, "extent state(4)"},
		"a hole with a place": {[]Extent{{0, 512, 512, ExtentNone}}, "hole"},
		"too many":            {make([]Extent, MaxExtents+1), "16385 extents"},
	} {
		s := segmentOf(Range{0, ToEOF}, 4096, 2)
		s.Mirrors[0].Servers[1].Extents = c.extents
		err := s.Validate()
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
}

package layout

import (
	"fmt"
	"strconv"
	"strings"
)

// Policy says how new files are laid out. A directory's is inherited by what is made in it; zero fields inherit the
// volume's default.
type Policy struct {
	StripeUnit  int64 // bytes, a multiple of MinStripeUnit
	StripeCount int   // data servers per mirror; more than there are devices means all of them
	Mirrors     int   // copies, each on other data servers
	Placement   Placement
	// MinCopies is for how many copies there must be data servers when a new file is made, which gets the others
	// later. So many good copies, at least, have what was synced. 0 is 1.
	MinCopies int
}

// Placement says which data servers new files go to.
type Placement uint8

const (
	// PlacementSpread is all of them in turn.
	PlacementSpread Placement = iota + 1
	// PlacementLocal is one on the host of whoever writes first, which gets all of the file, and others for further copies. Where
	// there is none it is as PlacementSpread.
	PlacementLocal
	placementEnd
)

var placements = [...]string{PlacementSpread: "spread", PlacementLocal: "local"}

func (p Placement) String() string {
	if p == 0 || p >= placementEnd {
		return fmt.Sprintf("placement(%d)", uint8(p))
	}
	return placements[p]
}

// ParsePlacement is the inverse of String.
func ParsePlacement(s string) (Placement, error) {
	for p := PlacementSpread; p < placementEnd; p++ {
		if s == p.String() {
			return p, nil
		}
	}
	return 0, fmt.Errorf("placement %q: want spread or local", s)
}

// Limits of a policy.
const (
	MaxStripeCount  = 256
	MaxPolicyMirror = 4
)

// Validate checks the fields that are set.
func (p Policy) Validate() error {
	if p.StripeUnit != 0 && (p.StripeUnit < MinStripeUnit || p.StripeUnit > MaxStripeUnit || p.StripeUnit%MinStripeUnit != 0) {
		return fmt.Errorf("stripe unit %d: want a multiple of %d from %d to %d bytes", p.StripeUnit, MinStripeUnit, MinStripeUnit, MaxStripeUnit)
	}
	if p.StripeCount < 0 || p.StripeCount > MaxStripeCount {
		return fmt.Errorf("stripe count %d: want 1 to %d", p.StripeCount, MaxStripeCount)
	}
	if p.Mirrors < 0 || p.Mirrors > MaxPolicyMirror {
		return fmt.Errorf("mirrors %d: want 1 to %d", p.Mirrors, MaxPolicyMirror)
	}
	if p.Placement >= placementEnd {
		return fmt.Errorf("%v", p.Placement)
	}
	if p.MinCopies < 0 || p.MinCopies > MaxPolicyMirror {
		return fmt.Errorf("min copies %d: want 1 to %d", p.MinCopies, MaxPolicyMirror)
	}
	if p.Mirrors != 0 && p.MinCopies > p.Mirrors {
		return fmt.Errorf("min copies %d: want no more than there are mirrors, %d", p.MinCopies, p.Mirrors)
	}
	return nil
}

// Or fills the unset fields of p from d.
func (p Policy) Or(d Policy) Policy {
	if p.StripeUnit == 0 {
		p.StripeUnit = d.StripeUnit
	}
	if p.StripeCount == 0 {
		p.StripeCount = d.StripeCount
	}
	if p.Mirrors == 0 {
		p.Mirrors = d.Mirrors
	}
	if p.Placement == 0 {
		p.Placement = d.Placement
	}
	if p.MinCopies == 0 {
		p.MinCopies = d.MinCopies
	}
	return p
}

// String is the form of the weft.layout extended attribute, which ParsePolicy reads: sizes in bytes, set fields only.
func (p Policy) String() string {
	var words []string
	if p.StripeUnit != 0 {
		words = append(words, "stripe_unit="+strconv.FormatInt(p.StripeUnit, 10))
	}
	if p.StripeCount != 0 {
		words = append(words, "stripe_count="+strconv.Itoa(p.StripeCount))
	}
	if p.Mirrors != 0 {
		words = append(words, "mirrors="+strconv.Itoa(p.Mirrors))
	}
	if p.Placement != 0 {
		words = append(words, "placement="+p.Placement.String())
	}
	if p.MinCopies != 0 {
		words = append(words, "min_copies="+strconv.Itoa(p.MinCopies))
	}
	return strings.Join(words, " ")
}

// ParsePolicy reads "stripe_unit=BYTES stripe_count=N mirrors=N placement=WHERE min_copies=N" in any order, each field
// at most once, and validates it.
func ParsePolicy(s string) (Policy, error) {
	var p Policy
	seen := map[string]bool{}
	for _, word := range strings.Fields(s) {
		key, val, ok := strings.Cut(word, "=")
		if !ok || seen[key] {
			return Policy{}, fmt.Errorf("layout policy %q: %q is not a single KEY=VALUE", s, word)
		}
		seen[key] = true
		if key == "placement" {
			var err error
			if p.Placement, err = ParsePlacement(val); err != nil {
				return Policy{}, fmt.Errorf("layout policy %q: %w", s, err)
			}
			continue
		}
		n, err := strconv.ParseInt(val, 10, 64)
		if err != nil || n <= 0 {
			return Policy{}, fmt.Errorf("layout policy %q: %q is not a positive number", s, val)
		}
		switch key {
		case "stripe_unit":
			p.StripeUnit = n
		case "stripe_count":
			p.StripeCount = int(min(n, MaxStripeCount+1))
		case "mirrors":
			p.Mirrors = int(min(n, MaxPolicyMirror+1))
		case "min_copies":
			p.MinCopies = int(min(n, MaxPolicyMirror+1))
		default:
			return Policy{}, fmt.Errorf("layout policy %q: no field %q; there are stripe_unit, stripe_count, mirrors, placement, min_copies", s, key)
		}
	}
	if err := p.Validate(); err != nil {
		return Policy{}, err
	}
	return p, nil
}

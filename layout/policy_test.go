package layout

import (
	"strings"
	"testing"
)

func TestParsePolicy(t *testing.T) {
	for in, want := range map[string]Policy{
		"":                    {},
		"  \t ":               {},
		"stripe_unit=1048576": {StripeUnit: 1 << 20},
		"stripe_count=4":      {StripeCount: 4},
		"mirrors=2":           {Mirrors: 2},
		"mirrors=4 stripe_unit=4096\nstripe_count=256": {StripeUnit: 4096, StripeCount: 256, Mirrors: 4},
		"stripe_unit=1073741824":                       {StripeUnit: MaxStripeUnit},
		"placement=local":                              {Placement: PlacementLocal},
		"mirrors=2 placement=spread":                   {Mirrors: 2, Placement: PlacementSpread},
		"min_copies=2":                                 {MinCopies: 2},
		"min_copies=2 mirrors=2":                       {Mirrors: 2, MinCopies: 2},
	} {
		got, err := ParsePolicy(in)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", in, got, err, want)
		}
	}
	for in, word := range map[string]string{ // what the message must name
		"stripe_unit":                          "stripe_unit",
		"stripe_unit=":                         `""`,
		"stripe_unit=0":                        `"0"`,
		"stripe_unit=-4096":                    "-4096",
		"stripe_unit=1MiB":                     "1MiB",
		"stripe_unit=4097":                     "4097",
		"stripe_unit=1024":                     "1024",
		"stripe_unit=2147483648":               "2147483648",
		"stripe_unit=99999999999999999999":     "99999999999999999999",
		"stripe_count=257":                     "257",
		"stripe_count=9223372036854775807":     "256",
		"mirrors=5":                            "5",
		"mirrors=18446744073709551617":         "18446744073709551617",
		"mirrors=1 mirrors=1":                  "mirrors=1",
		"width=3":                              "width",
		"=3":                                   `""`,
		"mirrors=2,stripe_count=2":             "2,stripe_count=2",
		"Mirrors=2":                            "Mirrors",
		strings.Repeat("x", 1000) + "=1":       "xxx",
		"mirrors=2 # two copies":               "#",
		"stripe_unit=4096 stripe_count=4 junk": "junk",
		"placement=":                           `""`,
		"placement=here":                       `"here"`,
		"placement=local placement=local":      "placement=local",
		"min_copies=0":                         `"0"`,
		"min_copies=5":                         "5",
		"mirrors=2 min_copies=3":               "min copies 3",
	} {
		got, err := ParsePolicy(in)
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %+v, %v; want an error that names %s", in, got, err, word)
		}
		if got != (Policy{}) {
			t.Errorf("%q: %+v with an error", in, got)
		}
	}
}

func TestPolicyOr(t *testing.T) {
	def := Policy{StripeUnit: 1 << 20, StripeCount: 4, Mirrors: 1, Placement: PlacementSpread}
	for _, c := range []struct{ p, want Policy }{
		{Policy{}, def},
		{Policy{Mirrors: 2}, Policy{1 << 20, 4, 2, PlacementSpread, 0}},
		{Policy{StripeUnit: 4096}, Policy{4096, 4, 1, PlacementSpread, 0}},
		{Policy{4096, 1, 3, PlacementLocal, 2}, Policy{4096, 1, 3, PlacementLocal, 2}},
	} {
		if got := c.p.Or(def); got != c.want {
			t.Errorf("%+v: %+v, want %+v", c.p, got, c.want)
		}
	}
}

func TestPolicyValidate(t *testing.T) {
	for _, p := range []Policy{
		{StripeUnit: -4096}, {StripeUnit: 1}, {StripeUnit: MaxStripeUnit + MinStripeUnit}, {StripeUnit: 6000},
		{StripeCount: -1}, {StripeCount: MaxStripeCount + 1}, {Mirrors: -1}, {Mirrors: MaxPolicyMirror + 1}, {Placement: placementEnd},
		{MinCopies: -1}, {MinCopies: MaxPolicyMirror + 1}, {Mirrors: 1, MinCopies: 2},
	} {
		if p.Validate() == nil {
			t.Errorf("%+v is valid", p)
		}
	}
	for _, p := range []Policy{{}, {StripeUnit: 12288}, {MinStripeUnit, 1, 1, PlacementSpread, 0}, {MaxStripeUnit, MaxStripeCount, MaxPolicyMirror, PlacementLocal, MaxPolicyMirror}} {
		if err := p.Validate(); err != nil {
			t.Errorf("%+v: %v", p, err)
		}
	}
}

// What is accepted is valid, is written in the form that is read, and means the same then.
func FuzzParsePolicy(f *testing.F) {
	for _, s := range []string{"", "stripe_unit=1048576 stripe_count=4 mirrors=2 placement=local", "mirrors=+3", "stripe_unit=4096=", "stripe_count=007", "mirrors=1\u00a0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePolicy(s)
		if err != nil {
			if p != (Policy{}) {
				t.Fatalf("%q: %+v with %v", s, p, err)
			}
			return
		}
		if err := p.Validate(); err != nil {
			t.Fatalf("%q: accepted, but %v", s, err)
		}
		again, err := ParsePolicy(p.String())
		if err != nil || again != p {
			t.Fatalf("%q: %+v, written %q, read back %+v, %v", s, p, p.String(), again, err)
		}
	})
}

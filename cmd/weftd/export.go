package main

import (
	"strings"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/server/meta/admit"
)

// exportRules is what --export has collected. Rules have commas, so a list separated by those is not what it takes.
type exportRules struct{ rules admit.Rules }

func exportFlag(fl *pflag.FlagSet) *exportRules {
	e := new(exportRules)
	fl.Var(e, "export", "what some clients may do, in the manner of exports(5): NETWORK(OPTION,...) or cert:NAME(OPTION,...), as in weft admin client set,\n"+
		"whose rules come before, where ro and root_squash go without saying (may be\n"+
		"repeated, the first that fits counts, others are refused; without any everybody has rw,no_root_squash)")
	return e
}

func (e *exportRules) Set(s string) error {
	rule, err := admit.Parse(s)
	if err == nil {
		e.rules = append(e.rules, rule)
	}
	return err
}

func (e *exportRules) Type() string { return "RULE" }

func (e *exportRules) String() string {
	var rules []string
	for _, rule := range e.rules {
		rules = append(rules, rule.String())
	}
	return strings.Join(rules, " ")
}

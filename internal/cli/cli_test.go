package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/spf13/pflag"
)

func TestProgram(t *testing.T) {
	var ran []string // the command, its title and its operands
	failed := errors.New("failed")
	run := func(_ context.Context, c *Command, args []string) error {
		fl := c.Flags("More.\n")
		code := fl.Int("code", 0, "exit `CODE`")
		if err := c.Parse(fl, args); err != nil {
			return err
		}
		ran = append([]string{c.Name, c.Title()}, fl.Args()...)
		if *code == 0 {
			return nil
		}
		return fmt.Errorf("with a code: %w", Exit(*code, failed))
	}
	alone := &Command{Name: "alone", Short: "be a program", Run: run}
	p := New("prog", "a program", 4, 5, []*Command{
		{Name: "set", Short: "set it", Run: run},
		{Name: "set all", Args: "X", Short: "set all", Run: run},
		{Name: "version", Short: "print it", Run: run},
		{Name: "fail", Short: "fail", Run: func(context.Context, *Command, []string) error { return failed }},
	})
	for _, c := range []struct {
		args []string
		ran  []string
		code int
	}{
		{[]string{"set", "x"}, []string{"set", "prog set", "x"}, 0},
		{[]string{"set", "all", "x"}, []string{"set all", "prog set all", "x"}, 0},
		{[]string{"--version"}, []string{"version", "prog version"}, 0},
		{[]string{"set", "--code", "7"}, []string{"set", "prog set"}, 7},
		{[]string{"set", "--help"}, nil, 0},
		{[]string{"--help"}, nil, 0},
		{nil, nil, 4},
		{[]string{"all"}, nil, 4},
		{[]string{"set", "--none"}, nil, 4},
		{[]string{"fail"}, nil, 5},
	} {
		ran = nil
		err := p.Run(t.Context(), c.args)
		if code := p.ExitCode(err); code != c.code || !slices.Equal(ran, c.ran) {
			t.Errorf("%q: code %d, ran %q, %v; want %d, %q", c.args, code, ran, err, c.code, c.ran)
		}
	}
	if err := alone.Run(t.Context(), alone, nil); err != nil || ran[1] != "alone" {
		t.Errorf("a command that is a program: %q, %v", ran, err)
	}
	m := p.Manual()
	if m.Name != "prog" || len(m.Commands) != 4 || m.Commands[1].More != "More.\n" || len(m.Commands[1].Flags) != 1 || m.Commands[1].Flags[0].Value != "CODE" {
		t.Errorf("%+v", m)
	}
}

func TestExit(t *testing.T) {
	p := New("prog", "a program", 4, 5, nil)
	for _, c := range []struct {
		err  error
		code int
	}{
		{nil, 0}, {Exit(3, nil), 0}, {pflag.ErrHelp, 0}, {Exit(3, errors.New("")), 3}, {Exit(3, Exit(6, errors.New("the first code counts"))), 6},
		{Exit(3, Usagef("wrong %s", "usage")), 4}, {errors.Join(errors.New("other"), Exit(3, errors.New("joined"))), 3},
	} {
		if code := p.ExitCode(c.err); code != c.code {
			t.Errorf("%v: %d, want %d", c.err, code, c.code)
		}
	}
}

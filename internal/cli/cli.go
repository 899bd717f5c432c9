// Package cli is what the programs have in common. They consist of commands, each of which has flags, a help page and an
// entry in the manual. They end with an exit code and a message of one line.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/manual"
	"github.com/weftfs/weft/internal/version"
)

// Program is a program of several commands.
type Program struct {
	Name     string // messages begin with it
	Short    string // describes the program in half a line
	Commands []*Command
	Usage    int // exit code for a wrong command line
	Failed   int // exit code for all other errors without a code of their own
}

// Command is one verb of a program.
type Command struct {
	Name  string // layout set
	Args  string // as in a usage line
	Short string // describes the command in half a line, without a capital
	Run   func(ctx context.Context, c *Command, args []string) error

	program string // with a space; empty if the command is a program by itself
}

// New makes a program of commands. See Program for the exit codes usage and failed.
func New(name, short string, usage, failed int, commands []*Command) *Program {
	for _, c := range commands {
		c.program = name + " "
	}
	return &Program{name, short, commands, usage, failed}
}

// Run runs the command that args begin with. The longest name wins: "layout set DIR" before "layout FILE".
func (p *Program) Run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		p.usage(os.Stderr)
		return Usagef("which command?")
	}
	switch args[0] {
	case "help", "--help", "-h":
		p.usage(os.Stdout)
		return nil
	case "--version":
		args = append([]string{"version"}, args[1:]...)
	}
	var best *Command
	var names []string
	words := 0
	for _, c := range p.Commands {
		names = append(names, c.Name)
		if verb := strings.Fields(c.Name); len(verb) > words && len(args) >= len(verb) && slices.Equal(args[:len(verb)], verb) {
			best, words = c, len(verb)
		}
	}
	if best == nil {
		return Usagef("no command %q; there are %s; see %s --help", strings.Join(args, " "), strings.Join(names, ", "), p.Name)
	}
	return best.Run(ctx, best, args[words:])
}

func (p *Program) usage(w io.Writer) {
	fmt.Fprintf(w, "%s %s: %s\n\nUsage:\n", p.Name, version.String(), p.Short)
	for _, c := range p.Commands {
		fmt.Fprintf(w, "  %s %s\n        %s\n", c.Title(), c.Args, c.Short)
	}
	fmt.Fprintf(w, "\n`%s COMMAND --help` shows a command's options and their defaults.\n", p.Name)
}

// Title is what a user types.
func (c *Command) Title() string { return c.program + c.Name }

// helpTo gets what --help would print, if it is not nil.
var helpTo func(fl *pflag.FlagSet, more string)

// Flags makes the flag set of the command; more is printed by --help below the flags.
func (c *Command) Flags(more string) *pflag.FlagSet {
	fl := pflag.NewFlagSet(c.Name, pflag.ContinueOnError)
	fl.SortFlags = false
	fl.Usage = func() {
		if helpTo != nil {
			helpTo(fl, more)
			return
		}
		fmt.Printf("Usage: %s %s\n\n%s.\n", c.Title(), c.Args, strings.ToUpper(c.Short[:1])+c.Short[1:])
		if fl.HasFlags() {
			fmt.Printf("\n%s", fl.FlagUsages())
		}
		fmt.Print(more)
	}
	return fl
}

// Parse parses args, with any number of operands.
func (c *Command) Parse(fl *pflag.FlagSet, args []string) error {
	err := fl.Parse(args)
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		return Usagef("%s: %v; see %s --help", c.Name, err, c.Title())
	}
	return err
}

// Manual is the command's entry in the manual: the text of its --help.
func (c *Command) Manual() manual.Command {
	m := manual.Command{Name: c.Name, Args: c.Args, Short: c.Short}
	helpTo = func(fl *pflag.FlagSet, more string) {
		m.AddFlags(fl)
		m.More = more
	}
	defer func() { helpTo = nil }()
	c.Run(context.Background(), c, []string{"--help"}) // which every command looks for first
	return m
}

// Manual is the manual of the program.
func (p *Program) Manual() *manual.Program {
	m := &manual.Program{Name: p.Name, Short: p.Short}
	for _, c := range p.Commands {
		m.Commands = append(m.Commands, c.Manual())
	}
	return m
}

// wrongUsage stands for the program's exit code for a wrong command line.
const wrongUsage = -1

// exit is an error with an exit code.
type exit struct {
	code int
	err  error
}

func (e *exit) Error() string { return e.err.Error() }

func (e *exit) Unwrap() error { return e.err }

// Exit gives an error an exit code, unless it has one. An error without a text ends the program without a message.
func Exit(code int, err error) error {
	if err == nil || errors.As(err, new(*exit)) {
		return err
	}
	return &exit{code, err}
}

// Usagef makes an error that says what is wrong with the command line.
func Usagef(format string, args ...any) error { return &exit{wrongUsage, fmt.Errorf(format, args...)} }

// ExitCode prints err, if any, and returns the exit code of the program.
func (p *Program) ExitCode(err error) int {
	if err == nil || errors.Is(err, pflag.ErrHelp) {
		return 0
	}
	if text := filename.OneLine(err); text != "" {
		fmt.Fprintf(os.Stderr, "%s: %s\n", p.Name, text)
	}
	e := &exit{code: p.Failed}
	if errors.As(err, &e); e.code == wrongUsage {
		return p.Usage
	}
	return e.code
}

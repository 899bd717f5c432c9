package manual

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
)

// Program is one with commands.
type Program struct {
	Name     string // weft
	Short    string // what it is, in half a line
	Commands []Command
	Options  []Option // for the flag -o of the command mount; none if it has no such command
}

// Command is one verb of a program.
type Command struct {
	Name  string // layout set
	Args  string // as in a usage line
	Short string // what it does, in half a line, without a capital
	More  string // more about it, in lines
	Flags []Flag
}

// Flag is one of a command.
type Flag struct {
	Name      string // without dashes
	Shorthand string // one letter; empty if there is none
	Value     string // placeholder; empty if it has no value
	Help      string
}

// AddFlags adds the flags of a set.
func (c *Command) AddFlags(fl *pflag.FlagSet) {
	fl.VisitAll(func(f *pflag.Flag) {
		value, help := pflag.UnquoteUsage(f)
		c.Flags = append(c.Flags, Flag{Name: f.Name, Shorthand: f.Shorthand, Value: value, Help: help})
	})
}

// Option is one for the flag -o.
type Option struct {
	Usage   string // NAME or NAME=VALUE
	Help    string
	General bool // of all file systems
}

// AddOption adds one for the flag -o.
func (p *Program) AddOption(usage, help string, general bool) {
	p.Options = append(p.Options, Option{usage, help, general})
}

// Section is what else a page has.
type Section struct{ Title, Text string } // paragraphs with empty lines between them; lines that are indented stay as they are

// Page writes a manual page of section 8 about all commands of a program.
func (p *Program) Page(w io.Writer, sections ...Section) error {
	t := &troff{w: w}
	t.head(p.Name, p.Short)
	t.macro("SH", "SYNOPSIS")
	for i, c := range p.Commands {
		if i > 0 {
			t.macro("br")
		}
		t.macro("B", p.Name+" "+c.Name)
		t.text(c.Args)
	}
	t.macro("SH", "COMMANDS")
	for _, c := range p.Commands {
		t.macro("SS", strings.TrimSpace(p.Name+" "+c.Name+" "+c.Args))
		t.text(sentence(c.Short))
		t.flags(c.Flags)
		t.paragraphs(c.More)
	}
	t.options(p.Options)
	for _, s := range sections {
		t.section(s)
	}
	return t.err
}

// Page writes a page about the command alone, with the options for its flag -o.
func (c Command) Page(w io.Writer, options []Option, sections ...Section) error {
	t := &troff{w: w}
	t.head(c.Name, c.Short)
	t.macro("SH", "SYNOPSIS")
	t.macro("B", c.Name)
	t.text(c.Args)
	t.macro("SH", "DESCRIPTION")
	t.text(sentence(c.Short))
	t.flags(c.Flags)
	t.options(options)
	for _, s := range sections {
		t.section(s)
	}
	return t.err
}

func sentence(s string) string {
	if s == "" {
		return ""
	}
	return strings.ToUpper(s[:1]) + s[1:] + "."
}

// troff writes macros and text of man(7).
type troff struct {
	w   io.Writer
	err error
}

func (t *troff) print(format string, args ...any) {
	if t.err == nil {
		_, t.err = fmt.Fprintf(t.w, format, args...)
	}
}

// escape makes text stand for itself.
var escape = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`, `"`, `\(dq`)

func (t *troff) macro(name string, args ...string) {
	t.print(".%s", name)
	for _, a := range args {
		t.print(` "%s"`, escape.Replace(a))
	}
	t.print("\n")
}

// text writes lines of text, none of which is taken for a macro.
func (t *troff) text(s string) {
	for line := range strings.Lines(s) {
		line = escape.Replace(strings.TrimSpace(line))
		if line == "" {
			continue
		}
		if line[0] == '.' {
			line = `\&` + line
		}
		t.print("%s\n", line)
	}
}

func (t *troff) head(name, short string) {
	t.macro("TH", strings.ToUpper(name), "8", "", "weft", "System Administration")
	t.macro("SH", "NAME")
	t.print("%s \\- %s\n", escape.Replace(name), escape.Replace(short))
}

func (t *troff) flags(flags []Flag) {
	for _, f := range flags {
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if f.Value != "" {
			name += " " + f.Value
		}
		t.macro("TP")
		t.macro("B", name)
		t.text(sentence(f.Help))
	}
}

func (t *troff) options(options []Option) {
	for _, part := range []struct {
		title   string
		general bool
	}{{"OPTIONS FOR -o", false}, {"OPTIONS OF ALL FILE SYSTEMS", true}} {
		title := part.title
		for _, o := range options {
			if o.General != part.general {
				continue
			}
			if title != "" {
				t.macro("SH", title)
				title = ""
			}
			t.macro("TP")
			t.macro("B", o.Usage)
			t.text(sentence(o.Help))
		}
	}
}

func (t *troff) section(s Section) {
	t.macro("SH", s.Title)
	t.paragraphs(s.Text)
}

func (t *troff) paragraphs(text string) {
	for i, part := range strings.Split(strings.Trim(text, "\n"), "\n\n") {
		if strings.TrimSpace(part) == "" {
			continue
		}
		if i > 0 {
			t.macro("PP")
		}
		if !strings.HasPrefix(part, "    ") {
			t.text(part)
			continue
		}
		t.macro("RS")
		t.macro("nf")
		t.text(part)
		t.macro("fi")
		t.macro("RE")
	}
}

package manual

import (
	"strings"
	"testing"
)

var program = &Program{
	Name: "tool", Short: "a tool",
	Commands: []Command{
		{Name: "do", Args: "FILE", Short: "do it", More: "\nA line.\n\n    indented -x\n", Flags: []Flag{{Name: "all", Shorthand: "a", Help: "all of 'them'"}, {Name: "to", Value: "FILE", Help: ".hidden"}}},
		{Name: "do again", Short: "do it again"},
	},
	Options: []Option{{Usage: "size=N", Help: "how much"}, {Usage: "ro", Help: "read-only", General: true}, {Usage: "x-*[=VALUE]", Help: "others", General: true}},
}

func TestPage(t *testing.T) {
	var b strings.Builder
	if err := program.Page(&b, Section{"FILES", "one\n\ntwo"}); err != nil {
		t.Fatal(err)
	}
	want := `.TH "TOOL" "8" "" "weft" "System Administration"
.SH "NAME"
tool \- a tool
.SH "SYNOPSIS"
.B "tool do"
FILE
.br
.B "tool do again"
.SH "COMMANDS"
.SS "tool do FILE"
Do it.
.TP
.B "\-a, \-\-all"
All of \(aqthem\(aq.
.TP
.B "\-\-to FILE"
\&.hidden.
A line.
.PP
.RS
.nf
indented \-x
.fi
.RE
.SS "tool do again"
Do it again.
.SH "OPTIONS FOR \-o"
.TP
.B "size=N"
How much.
.SH "OPTIONS OF ALL FILE SYSTEMS"
.TP
.B "ro"
Read\-only.
.TP
.B "x\-*[=VALUE]"
Others.
.SH "FILES"
one
.PP
two
`
	if b.String() != want {
		t.Errorf("%s\nwant\n%s", &b, want)
	}
}

func TestNext(t *testing.T) {
	for before, want := range map[string]string{"": "do", "do ": "again", "do again ": "", "no": ""} {
		if got := strings.Join(program.next(before), " "); got != want {
			t.Errorf("%q: %q, want %q", before, got, want)
		}
	}
	if got := program.optionWords(); got != "size= ro" {
		t.Errorf("options: %q", got)
	}
	if err := program.Completion(&strings.Builder{}, "csh"); err == nil || !strings.Contains(err.Error(), `"csh"`) {
		t.Errorf("a shell that is not known: %v", err)
	}
}

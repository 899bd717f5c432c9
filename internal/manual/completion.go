package manual

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Shells are those that Completion writes for.
var Shells = []string{"bash", "zsh", "fish"}

// Completion writes what a shell sources to complete the program's commands, flags and options.
func (p *Program) Completion(w io.Writer, shell string) error {
	switch shell {
	case "bash":
		return p.bash(w)
	case "zsh": // its own completions in the form of bash
		if _, err := fmt.Fprintf(w, "#compdef %s\nautoload -U +X bashcompinit && bashcompinit\n", p.Name); err != nil {
			return err
		}
		return p.bash(w)
	case "fish":
		return p.fish(w)
	}
	return fmt.Errorf("shell %q: want %s", shell, strings.Join(Shells, ", "))
}

func (f *Flag) words() []string {
	words := []string{"--" + f.Name}
	if f.Shorthand != "" {
		words = append(words, "-"+f.Shorthand)
	}
	return words
}

// next are the words that may follow others of a command's name.
func (p *Program) next(before string) (words []string) {
	seen := map[string]bool{}
	for _, c := range p.Commands {
		rest, ok := strings.CutPrefix(c.Name, before)
		if !ok || rest == "" {
			continue
		}
		if word := strings.Fields(rest)[0]; !seen[word] {
			seen[word] = true
			words = append(words, word)
		}
	}
	return words
}

// prefixes are the beginnings of commands of several words, each with a space behind it, longer ones first; the empty one is the last.
func (p *Program) prefixes() (all []string) {
	seen := map[string]bool{}
	for words := 2; words >= 0; words-- {
		for _, c := range p.Commands {
			if fields := strings.Fields(c.Name); len(fields) > words {
				before := strings.Join(fields[:words], " ")
				if before != "" {
					before += " "
				}
				if !seen[before] {
					seen[before] = true
					all = append(all, before)
				}
			}
		}
	}
	return all
}

func (p *Program) optionWords() string {
	var words []string
	for _, o := range p.Options {
		name, _, value := strings.Cut(o.Usage, "=")
		if strings.ContainsAny(name, "*[") {
			continue
		}
		if value {
			name += "="
		}
		words = append(words, name)
	}
	return strings.Join(words, " ")
}

func (p *Program) bash(w io.Writer) error {
	var b strings.Builder
	fn := "_" + strings.ReplaceAll(p.Name, "-", "_")
	fmt.Fprintf(&b, "%s() {\n", fn)
	b.WriteString("\tlocal cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} words=\n")
	b.WriteString("\tlocal line=\"${COMP_WORDS[*]:1:COMP_CWORD-1} \"\n")
	b.WriteString("\t[[ $line == ' ' ]] && line=\n")
	if len(p.Options) > 0 {
		b.WriteString("\tif [[ $prev == -o ]]; then\n\t\tlocal done=\n\t\t[[ $cur == *,* ]] && done=${cur%,*},\n")
		fmt.Fprintf(&b, "\t\tCOMPREPLY=($(compgen -P \"$done\" -W '%s' -- \"${cur##*,}\"))\n", p.optionWords())
		b.WriteString("\t\tcompopt -o nospace 2>/dev/null\n\t\treturn\n\tfi\n")
	}
	b.WriteString("\tcase $line in\n")
	longest := slices.SortedStableFunc(slices.Values(p.Commands), func(a, b Command) int {
		return cmp.Compare(strings.Count(b.Name, " "), strings.Count(a.Name, " "))
	})
	for _, c := range longest {
		var words []string
		for i := range c.Flags {
			words = append(words, c.Flags[i].words()...)
		}
		words = append(words, "--help")
		words = append(words, p.next(c.Name+" ")...)
		fmt.Fprintf(&b, "\t'%s '*) words='%s' ;;\n", c.Name, strings.Join(words, " "))
	}
	for _, before := range p.prefixes() {
		fmt.Fprintf(&b, "\t'%s') words='%s' ;;\n", before, strings.Join(p.next(before), " "))
	}
	b.WriteString("\tesac\n\tCOMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n")
	fmt.Fprintf(&b, "}\ncomplete -o default -F %s %s\n", fn, p.Name)
	_, err := io.WriteString(w, b.String())
	return err
}

func quoteFish(s string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(s) + "'"
}

func (p *Program) fish(w io.Writer) error {
	var b strings.Builder
	for _, before := range p.prefixes() {
		// Those words have been typed, and none behind them.
		typed := strings.Fields(before)
		test := fmt.Sprintf("test (count (commandline -opc)) -eq %d", len(typed)+1)
		for i, word := range typed {
			test += fmt.Sprintf("; and test (commandline -opc)[%d] = %s", i+2, word)
		}
		for _, word := range p.next(before) {
			short := ""
			for _, c := range p.Commands {
				if c.Name == before+word {
					short = c.Short
				}
			}
			fmt.Fprintf(&b, "complete -c %s -n %s -a %s -d %s\n", p.Name, quoteFish(test), word, quoteFish(short))
		}
	}
	for _, c := range p.Commands {
		words := strings.Fields(c.Name)
		test := fmt.Sprintf("test (count (commandline -opc)) -gt %d", len(words))
		for i, word := range words {
			test += fmt.Sprintf("; and test (commandline -opc)[%d] = %s", i+2, word)
		}
		for _, f := range c.Flags {
			fmt.Fprintf(&b, "complete -c %s -n %s -l %s", p.Name, quoteFish(test), f.Name)
			if f.Shorthand != "" {
				fmt.Fprintf(&b, " -s %s", f.Shorthand)
			}
			if f.Value != "" {
				b.WriteString(" -r")
			}
			if f.Name == "options" && len(p.Options) > 0 {
				fmt.Fprintf(&b, " -a %s", quoteFish("(__fish_complete_list , 'string split \" \" \""+p.optionWords()+"\"')"))
			}
			fmt.Fprintf(&b, " -d %s\n", quoteFish(f.Help))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

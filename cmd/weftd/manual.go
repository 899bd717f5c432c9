package main

import (
	"os"

	"github.com/weftfs/weft/internal/manual"
)

// runManual writes the manual page, or what a shell sources, for weft install.
func runManual(args []string) error {
	p := program.Manual()
	switch {
	case len(args) == 1 && args[0] == "man":
		return p.Page(os.Stdout,
			manual.Section{Title: "FILES", Text: "/etc/weft/meta.conf, /etc/weft/data.conf: OPTIONS=... of the services that systemd starts.\n\n/run/weft/localio/: sockets of data servers, for clients on this host."},
			manual.Section{Title: "EXIT STATUS", Text: "0: done, or ended by a signal. 1: it failed. 2: wrong arguments. Those of fsck are fsck(8)'s."},
			manual.Section{Title: "SEE ALSO", Text: "weft(8), mount.weft(8), systemd.service(5)"})
	case len(args) == 1:
		if err := p.Completion(os.Stdout, args[0]); err != nil {
			return usagef("manual: %v", err)
		}
		return nil
	}
	return usagef("manual: want man, bash, zsh or fish")
}

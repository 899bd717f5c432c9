package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/metaclient"
)

func runClientSet(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nRULE is WHO(OPTION,...), in the manner of exports(5). WHO is a network, an address, cert:NAME for clients with a certificate of that name, in which *\n" +
		"stands for anything, or * for everybody. Options are ro (as without), rw, root_squash (as without), no_root_squash, all_squash, no_all_squash, anonuid=N, anongid=N, and:\n" +
		"path=DIR       they get this directory of the volume and what is below it, and cannot leave it\n" +
		"uids=A-B+C     users that they can have; those with others are anonymous. gids= is the same for groups\n" +
		"ops=N          metadata operations a second of each client and metadata service\n" +
		"It takes the place of the rule for the same WHO. The most specific one counts: names of certificates, then those with *, then networks, the smaller\n" +
		"first; after them those of weftd --export. As soon as there is a rule, whom none lets in is refused. What was open stays as it was opened.\n")
	server := serviceFlag(fl)
	force := fl.Bool("force", false, "also if it cuts clients off that are connected, and that no rule lets in then")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	return withService(ctx, server, c.Name, func(ctx context.Context, mc *metaclient.Volume) error {
		return mc.SetClientRule(ctx, fl.Arg(0), *force)
	})
}

func runClientRemove(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nWHO is as ls shows it. Clients that no other rule lets in lose their sessions, and with them what they have not made stable.\n")
	server := serviceFlag(fl)
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	return withService(ctx, server, c.Name, func(ctx context.Context, mc *metaclient.Volume) error {
		return mc.RemoveClientRule(ctx, fl.Arg(0))
	})
}

func runClientList(ctx context.Context, c *command, args []string) error {
	return printAnswer(ctx, c, args, "print an array of objects", (*metaclient.Volume).ClientRules, printRules)
}

// clientRule is the form of `weft admin client ls --json`.
type clientRule struct {
	Who     string `json:"who"`
	Options string `json:"options"`
	From    string `json:"from"` // catalog, or --export of the service
}

func printRules(rules *metarpc.ClientListResult, asJSON bool) error {
	list := []clientRule{}
	add := func(from string, rules []string) {
		for _, rule := range rules {
			who, options, _ := strings.Cut(strings.TrimSuffix(rule, ")"), "(")
			list = append(list, clientRule{Who: who, Options: options, From: from})
		}
	}
	add("catalog", rules.Rules)
	add("--export", rules.Given)
	none := "no rules: everybody who reaches a metadata service may do everything; set one with: weft admin client set 'WHO(OPTION,...)'"
	return printList(list, asJSON, none, func(w io.Writer) {
		for _, rule := range list {
			fmt.Fprintf(w, "%s(%s)", filename.Escape(rule.Who), filename.Escape(rule.Options))
			also(w, rule.From != "catalog", "  (by %s)", rule.From)
			fmt.Fprintln(w)
		}
	})
}

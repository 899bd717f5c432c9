package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/weftfs/weft/metaclient"
)

// newTable writes lines, in which tabs end cells, with the cells in columns.
func newTable(out io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(out, 0, 8, 2, ' ', 0) }

// also prints a phrase if is holds.
func also(out io.Writer, is bool, format string, args ...any) {
	if is {
		fmt.Fprintf(out, format, args...)
	}
}

// printList prints a list as JSON, or the hint none if it is empty, or else what print writes to a table.
func printList[T any](list []T, asJSON bool, none string, print func(io.Writer)) error {
	switch {
	case asJSON:
		return json.NewEncoder(os.Stdout).Encode(list)
	case len(list) == 0:
		fmt.Println(none)
		return nil
	}
	table := newTable(os.Stdout)
	print(table)
	return table.Flush()
}

// printAnswer runs a command without operands: print gets what ask has asked a metadata service for.
func printAnswer[T any](ctx context.Context, c *command, args []string, jsonHelp string,
	ask func(*metaclient.Volume, context.Context) (T, error), print func(answer T, asJSON bool) error) error {
	fl := c.Flags("")
	server := serviceFlag(fl)
	asJSON := fl.Bool("json", false, jsonHelp)
	if err := parse(c, fl, args, 0, 0); err != nil {
		return err
	}
	return withService(ctx, server, c.Name, func(ctx context.Context, mc *metaclient.Volume) error {
		answer, err := ask(mc, ctx)
		if err != nil {
			return err
		}
		return print(answer, *asJSON)
	})
}

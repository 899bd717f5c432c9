package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/metaclient"
)

// metaStatus is the form of `weft admin meta ls --json`.
type metaStatus struct {
	Shards   int           `json:"shards"`
	Unserved []int         `json:"unserved,omitempty"` // shards that nobody has
	Services []metaService `json:"services"`
}

type metaService struct {
	Address  string    `json:"address"`
	Host     string    `json:"host"`
	Version  string    `json:"version"`
	Protocol string    `json:"protocol,omitempty"` // versions that it speaks with clients; empty: the service that was asked cannot tell
	Started  time.Time `json:"started"`
	State    string    `json:"state"`            // up, draining or silent
	Silent   float64   `json:"silent,omitempty"` // seconds for which nobody has heard of it
	Shards   []int     `json:"shards"`
	Sessions int       `json:"sessions"` // of clients, for these shards
}

// metaStates are the words for metarpc.MetaState.
var metaStates = map[metarpc.MetaState]string{metarpc.MetaUp: "up", metarpc.MetaDraining: "draining", metarpc.MetaSilent: "silent"}

func metaOf(r *metarpc.MetaListResult) metaStatus {
	st := metaStatus{Shards: r.Shards, Services: []metaService{}}
	served := map[int]bool{}
	for _, s := range r.Services {
		m := metaService{
			Address: s.Address, Host: s.Host, Version: s.Program, Started: time.Unix(0, s.Started), State: metaStates[s.State],
			Silent: time.Duration(s.Silent).Seconds(), Shards: s.Shards, Sessions: s.Sessions,
		}
		if m.Shards == nil {
			m.Shards = []int{}
		}
		switch {
		case s.Lowest < s.Highest:
			m.Protocol = fmt.Sprintf("%d-%d", s.Lowest, s.Highest)
		case s.Highest > 0:
			m.Protocol = fmt.Sprint(s.Highest)
		}
		for _, shard := range s.Shards {
			served[shard] = true
		}
		st.Services = append(st.Services, m)
	}
	slices.SortFunc(st.Services, func(a, b metaService) int { return cmp.Compare(a.Address, b.Address) })
	for shard := range r.Shards {
		if !served[shard] {
			st.Unserved = append(st.Unserved, shard)
		}
	}
	return st
}

func (st *metaStatus) print(out io.Writer) {
	w := newTable(out)
	for _, s := range st.Services {
		state := s.State
		if state == "silent" {
			state = fmt.Sprintf("silent for %v", time.Duration(s.Silent*float64(time.Second)).Round(time.Second))
		}
		fmt.Fprintf(w, "%s\t%s\tshards %s\t%d sessions\t%s", s.Address, state, shardList(s.Shards), s.Sessions, s.Version)
		also(w, s.Protocol != "", ", protocol %s", s.Protocol)
		fmt.Fprintf(w, "\ton %s, started %s\n", filename.Quote(s.Host), humanize.Time(s.Started))
	}
	w.Flush()
	also(out, len(st.Unserved) > 0, "nobody has shards %s\n", shardList(st.Unserved))
}

func runMetaList(ctx context.Context, c *command, args []string) error {
	return printAnswer(ctx, c, args, "print an object", (*metaclient.Volume).MetaList, func(r *metarpc.MetaListResult, asJSON bool) error {
		st := metaOf(r)
		if asJSON {
			return json.NewEncoder(os.Stdout).Encode(st)
		}
		st.print(os.Stdout)
		return nil
	})
}

func runMetaDrain(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nClients go on with their sessions at the others. When ls shows no shards there any more the service can be stopped, and nobody waits for it.\n")
	server := serviceFlag(fl)
	cancel := fl.Bool("cancel", false, "let it have shards again")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	addr, err := parseHost(fl.Arg(0))
	if err != nil {
		return usagef("admin meta drain: %v", err)
	}
	return withService(ctx, server, "admin meta drain", func(ctx context.Context, mc *metaclient.Volume) error {
		r, err := mc.MetaDrain(ctx, addr, *cancel)
		if err != nil {
			return err
		}
		st := metaOf(r)
		st.print(os.Stdout)
		return nil
	})
}

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

// mountStatus is what a serving process says of itself, and the form of `weft status --json`.
type mountStatus struct {
	Mountpoint filename.JSON  `json:"mountpoint"`
	Source     filename.JSON  `json:"source"`
	PID        int            `json:"pid"`
	Version    string         `json:"version"`
	Since      time.Time      `json:"since"`
	Error      filename.JSON  `json:"error,omitempty"` // why the rest is not known
	MaxWrite   int            `json:"max_write"`       // bytes the kernel sends at once
	Transport  string         `json:"transport"`       // what serves the FUSE device: gofuse or device
	Options    string         `json:"options"`         // weft's own, as they were given
	Retained   int64          `json:"retained_bytes"`  // written, not yet stable on the data servers
	Service    serviceStatus  `json:"service"`
	Devices    []deviceStatus `json:"devices"`
	Slow       []slowRequest  `json:"slow"` // requests of programs that have been waiting for 10 s and more, the oldest first
	// Discovery are the NVMe discovery controllers that it follows, the one chosen of nvme-discovery first.
	Discovery []discoveryStatus `json:"discovery,omitempty"`
	// Passthrough are files that the kernel serves by itself, and NoPassthrough is why it does not though it was to.
	Passthrough   []passedFile `json:"passthrough"`
	NoPassthrough string       `json:"no_passthrough,omitempty"`
}

// passedFile is a file that is open in passthrough.
type passedFile struct {
	Inode  uint64    `json:"inode"`
	Device string    `json:"device"`
	Mode   string    `json:"mode"` // ro, or rw if the kernel writes it by itself
	Since  time.Time `json:"since"`
	PIDs   []int     `json:"pids"` // processes that have opened it
}

// heldUp is what is not done to a file because it is open in passthrough somewhere.
type heldUp struct {
	Inode uint64    `json:"inode"`
	What  string    `json:"what"`
	Since time.Time `json:"since"`
	Hosts []string  `json:"hosts"` // where it is open so
}

type serviceStatus struct {
	Address   string `json:"address"`
	XprtSec   string `json:"xprtsec"` // of connections to it: none, tls or mtls
	Connected bool   `json:"connected"`
	Problem   string `json:"problem,omitempty"`
	Version   string `json:"version,omitempty"`
	Sessions  int    `json:"sessions"`
	Grace     bool   `json:"grace"`                // restarted and still waiting for clients of before
	Garbage   int64  `json:"garbage"`              // data files that wait for removal
	Stale     int64  `json:"stale_files"`          // with copies of mirrored data that are still to be made anew
	NoServer  int64  `json:"files_without_server"` // those of them that wait for one more data server
	Copied    int64  `json:"copied_bytes"`         // for that, since the service was started
	// Catalog is how much room the catalog has.
	Catalog catalogStatus `json:"catalog"`
	// HeldUp is what waits for files that are open in passthrough.
	HeldUp []heldUp `json:"held_up,omitempty"`

	// Shards is how many the volume has, and what follows is told if there are several: which service has which, as far as the mount has heard (Unserved:
	// nobody), with the number by which that is told from older news; and the mount's sessions. All that is said above of one service is a sum then.
	Shards   int             `json:"shards,omitempty"`
	Epoch    uint64          `json:"ring_epoch,omitempty"`
	Services []ringService   `json:"services,omitempty"`
	Unserved []int           `json:"unserved,omitempty"`
	Parts    []sessionStatus `json:"shard_sessions,omitempty"`

	Clients []clientStatus `json:"clients,omitempty"` // of the services that were asked

	Calls  map[string]uint64 `json:"calls"`  // that the mount has sent, for each kind
	Leases int               `json:"leases"` // inodes of which attributes or names need not be asked for
}

// catalogStatus is how much room a catalog has on its disk.
type catalogStatus struct {
	State   string `json:"state"`         // ok, low if it will soon be full, full if nothing new can be made
	Free    int64  `json:"free_bytes"`    // without the reserve
	Size    int64  `json:"size_bytes"`    // 0: not known
	Reserve int64  `json:"reserve_bytes"` // for what makes room
}

func catalogOf(r metarpc.CatalogRoom) catalogStatus {
	state := "ok"
	switch {
	case r.Full:
		state = "full"
	case r.Low:
		state = "low"
	}
	return catalogStatus{state, r.Free, r.Size, r.Reserve}
}

// trouble describes a lack of room; it is empty if there is none.
func (c *catalogStatus) trouble() string {
	space := ""
	if c.Size > 0 {
		space = fmt.Sprintf(" (%s free of %s, %s in reserve)",
			humanize.IBytes(uint64(c.Free)), humanize.IBytes(uint64(c.Size)), humanize.IBytes(uint64(c.Reserve)))
	}
	switch c.State {
	case "full":
		return "no room" + space + ": nothing new can be made in the volume"
	case "low":
		return "little room" + space + ": when there is none, nothing new can be made in the volume"
	}
	return ""
}

// clientStatus is a session of a client with a metadata service.
type clientStatus struct {
	ID      string        `json:"id"`
	Host    string        `json:"host"`
	Mount   filename.JSON `json:"mount"`
	Address string        `json:"address"`
	Heard   time.Time     `json:"heard"`
	Opens   int           `json:"opens"`
	Layouts int           `json:"layouts"` // for writing
	Calls   uint64        `json:"calls"`
}

// ringService is a metadata service of several.
type ringService struct {
	Address string `json:"address"`
	Shards  []int  `json:"shards"`
}

// sessionStatus is the session that a mount has for one of several shards.
type sessionStatus struct {
	Shard      int       `json:"shard"`
	Address    string    `json:"address"`
	Connected  bool      `json:"connected"`
	Problem    string    `json:"problem,omitempty"`
	Since      time.Time `json:"since"` // it has been connected or not
	Reconnects int       `json:"reconnects"`
	Leases     int       `json:"leases"`
}

type deviceStatus struct {
	ID        string `json:"id"`
	Address   string `json:"address"`
	Reachable bool   `json:"reachable"`
	Problem   string `json:"problem,omitempty"`
	Total     int64  `json:"total_bytes"`
	Free      int64  `json:"free_bytes"`
	DataFiles int64  `json:"data_files"`
	Draining  bool   `json:"draining"`
	Waiting   int64  `json:"waiting_files"` // that get copies only when it can be used
	// Caches are those of the data files that weft prefetch has made, or is making.
	Caches     int64 `json:"caches"`
	CacheBytes int64 `json:"cache_bytes"`
	// Complaints is how many clients get no answer from it though the metadata service does.
	Complaints uint32 `json:"complaints"`
	// Load is how many requests clients have under way there on average, as the service knows it.
	Load float64 `json:"load"`
	// Fencing is how lost clients are kept from it, and Portals are the addresses that it is reached at, of an NVMe namespace.
	Fencing string   `json:"fencing,omitempty"`
	Portals []string `json:"portals,omitempty"`
	// Local is whether this mount reads and writes data files there without RPC, and Reason why not, or why it only reads.
	Local    bool   `json:"local"`
	Reason   string `json:"reason,omitempty"`
	OpsLocal uint64 `json:"ops_local"` // requests without RPC
	OpsRPC   uint64 `json:"ops_rpc"`

	Mount *deviceUse `json:"mount,omitempty"` // what this mount does there; nil = nothing so far
}

// answerTime bounds how long a serving process is asked how its mount is. Tests make it shorter.
var answerTime = 10 * time.Second

// askState asks the serving process how the mount is: status, top or stacks.
func (m mountEntry) askState(ctx context.Context, op string, state any) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	return control(ctx, m, controlRequest{Op: op}, state)
}

// status is the state of the mount. It is empty if there is an error.
func (m mountEntry) status(ctx context.Context) (mountStatus, error) {
	var st mountStatus
	if err := m.askState(ctx, "status", &st); err != nil {
		return mountStatus{}, err
	}
	return st, nil
}

// selectMounts is the mount at the operand, or all.
func selectMounts(args []string) ([]mountEntry, error) {
	if len(args) == 0 {
		return weftMounts()
	}
	m, err := mountAt(args[0])
	return []mountEntry{m}, err
}

func runStatus(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	asJSON := fl.Bool("json", false, "print an array of objects, one for each mount")
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	mounts, err := selectMounts(fl.Args())
	if err != nil {
		return err
	}
	list := []mountStatus{}
	var failed error
	for _, m := range mounts {
		st, err := m.status(ctx)
		if err != nil {
			st.Error = filename.JSON(err.Error())
			failed = errors.Join(failed, err)
		}
		st.Mountpoint, st.Source = filename.JSON(m.Mountpoint), filename.JSON(m.Source)
		list = append(list, st)
	}
	return errors.Join(printList(list, *asJSON, "no weft mounts", func(out io.Writer) {
		for _, st := range list {
			st.print(out)
		}
	}), failed)
}

func (st *mountStatus) print(out io.Writer) {
	fmt.Fprintf(out, "%s on %s\n", filename.Quote(string(st.Source)), filename.Quote(string(st.Mountpoint)))
	if st.Error != "" {
		return
	}
	fmt.Fprintf(out, "  served by   process %d, weft %s, since %s\n", st.PID, st.Version, humanize.Time(st.Since))
	fmt.Fprintf(out, "  requests    up to %s, transport=%s; %s written and not stable yet\n",
		humanize.IBytes(uint64(st.MaxWrite)), st.Transport, humanize.IBytes(uint64(st.Retained)))
	if s := st.Service; s.Connected && s.Problem == "" || s.Shards > 1 && s.Version != "" {
		fmt.Fprintf(out, "  metadata    %s", s.Address)
		also(out, s.XprtSec != string(rpctls.None), " (xprtsec=%s)", s.XprtSec)
		fmt.Fprintf(out, ", %s, %d sessions, %d data files to remove", s.Version, s.Sessions, s.Garbage)
		also(out, s.Grace, ", in grace after a restart")
		fmt.Fprintln(out)
		if s.Stale > 0 || s.Copied > 0 {
			fmt.Fprintf(out, "  mirrors     %d files with copies to be made anew", s.Stale)
			also(out, s.NoServer > 0, " (%d wait for one more data server)", s.NoServer)
			fmt.Fprintf(out, "; %s copied\n", humanize.IBytes(uint64(s.Copied)))
		}
		trouble := s.Catalog.trouble()
		also(out, trouble != "", "  catalog     %s\n", trouble)
	} else {
		fmt.Fprintf(out, "  metadata    %s: %s\n", s.Address, s.Problem)
	}
	st.printSlow(out)
	st.Service.printShards(out)
	st.printDiscovery(out)
	printDevices(out, st.Devices, "  ")
	st.printPassthrough(out)
}

// printShards writes where the shards are, if there are several, and which of them the mount cannot reach.
func (st *serviceStatus) printShards(out io.Writer) {
	if st.Shards <= 1 {
		return
	}
	parts := []string{}
	for _, service := range st.Services {
		parts = append(parts, service.Address+" has "+shardList(service.Shards))
	}
	if len(st.Unserved) > 0 {
		parts = append(parts, "nobody has "+shardList(st.Unserved))
	}
	fmt.Fprintf(out, "  shards      %d, sessions for %d; %s\n", st.Shards, len(st.Parts), strings.Join(parts, "; "))
	for _, p := range st.Parts {
		also(out, !p.Connected, "  shard %-5d %s\n", p.Shard, p.Problem)
	}
}

// shardList is shards in their order as people write them: 0-3,7.
func shardList(shards []int) string {
	if len(shards) == 0 {
		return "none"
	}
	var parts []string
	for at := 0; at < len(shards); {
		end := at + 1
		for end < len(shards) && shards[end] == shards[end-1]+1 {
			end++
		}
		if end-at == 1 {
			parts = append(parts, strconv.Itoa(shards[at]))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", shards[at], shards[end-1]))
		}
		at = end
	}
	return strings.Join(parts, ",")
}

// printDiscovery writes a line, if discovery controllers are followed.
func (st *mountStatus) printDiscovery(out io.Writer) {
	if len(st.Discovery) == 0 {
		return
	}
	var all []string
	for i := range st.Discovery {
		all = append(all, st.Discovery[i].String())
	}
	fmt.Fprintf(out, "  discovery   %s\n", strings.Join(all, "; "))
}

// printPassthrough writes what the kernel serves by itself, and what that holds up, with who has it open here.
func (st *mountStatus) printPassthrough(out io.Writer) {
	writes := 0
	for _, f := range st.Passthrough {
		if f.Mode == "rw" {
			writes++
		}
	}
	switch {
	case st.NoPassthrough != "":
		fmt.Fprintf(out, "  passthrough: no, because %s\n", st.NoPassthrough)
	case len(st.Passthrough) > 0:
		fmt.Fprintf(out, "  passthrough: %d files are served by the kernel, %d of them for writing\n", len(st.Passthrough), writes)
	}
	for _, held := range st.Service.HeldUp {
		fmt.Fprintf(out, "  held up     %s of inode %d waits, since %s, until it is closed at %s", held.What, held.Inode, humanize.Time(held.Since), filename.Escape(strings.Join(held.Hosts, ", ")))
		for _, f := range st.Passthrough {
			also(out, f.Inode == held.Inode, "; here it was opened by processes %s", strings.Trim(fmt.Sprint(f.PIDs), "[]"))
		}
		fmt.Fprintln(out)
	}
}

func printDevices(out io.Writer, devices []deviceStatus, indent string) {
	var table bytes.Buffer // a line for each device, in columns
	w := newTable(&table)
	for _, d := range devices {
		fmt.Fprintf(w, "%sdevice %s\t%s\t%s free of %s\t%d data files\t%s", indent, d.ID[:8], d.Address,
			humanize.IBytes(uint64(d.Free)), humanize.IBytes(uint64(d.Total)), d.DataFiles, cmp.Or(d.Problem, "ok"))
		also(w, d.Complaints > 0, " for the metadata service, but does not answer %d of the clients", d.Complaints)
		also(w, d.Draining, ", is drained")
		also(w, d.Waiting > 0, ", %d files wait for it", d.Waiting)
		also(w, d.Load >= 0.1, ", load %.1f", d.Load)
		also(w, d.Caches > 0, ", %d files cached with %s", d.Caches, humanize.IBytes(uint64(d.CacheBytes)))
		also(w, d.Fencing != "", ", fenced by %s", d.Fencing)
		fmt.Fprintln(w)
	}
	w.Flush()
	for _, d := range devices {
		line, _ := table.ReadString('\n')
		io.WriteString(out, line)
		also(out, len(d.Portals) > 1, "%s  reached at %s\n", indent, strings.Join(d.Portals, ", "))
		switch {
		case d.Local && d.Reason != "":
			fmt.Fprintf(out, "%s  local: yes, for reading only, because %s", indent, d.Reason)
		case d.Local:
			fmt.Fprintf(out, "%s  local: yes", indent)
		case d.Reason != "":
			fmt.Fprintf(out, "%s  local: no, because %s", indent, d.Reason)
		}
		also(out, d.OpsLocal > 0, "; %d requests without RPC, %d with it", d.OpsLocal, d.OpsRPC)
		also(out, d.Local || d.Reason != "", "\n")
		if d.Mount != nil {
			d.Mount.print(out, indent+"  ")
		}
	}
}

func runSync(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	mounts, err := selectMounts(fl.Args())
	if err != nil {
		return err
	}
	var failed error
	for _, m := range mounts {
		failed = errors.Join(failed, control(ctx, m, controlRequest{Op: "sync"}, &struct{}{}))
	}
	return failed
}

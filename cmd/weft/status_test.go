package main

import (
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

func TestPrintDevices(t *testing.T) {
	ago := time.Now().Add(-5 * time.Minute)
	devices := []deviceStatus{
		{
			ID: strings.Repeat("1a", 16), Address: "nfs://10.11.12.13:20049/srv/weft", Reachable: true, Total: 3 << 40, Free: 1 << 40, DataFiles: 123456, Load: 12.34,
			Mount: &deviceUse{
				Path: "tls", Why: "xprtsec=mtls", Connections: []connectionUse{{Up: true}, {}, {Up: true}}, Outstanding: 1234, Down: true, Resent: 123, Jukebox: 12,
				Reads:  opUse{Ops: 1234567, Bytes: 5 << 40, P50: 393216, P99: 6291456},
				Writes: opUse{Ops: 1, Bytes: 1, P50: 12, P99: int64(3 * time.Second / 2)},
				Errors: 2, Error: "READ failed", ErrorAt: ago, Trouble: "10.11.12.13:20049: refused", Since: ago,
			},
		},
		{ID: strings.Repeat("2b", 16), Address: "nfs://b:2049/", Problem: "gone", Draining: true, Waiting: 7, Mount: &deviceUse{Errors: 1, Error: "unknown", ErrorAt: ago}},
		{ID: strings.Repeat("3c", 16), Address: "nfs://c:2049/", Reachable: true},
		{ID: strings.Repeat("5e", 16), Address: "nfs://e:2049/", Reachable: true, Complaints: 2},
		{
			ID: strings.Repeat("4d", 16), Address: "nvme://d:4420/n#1", Reachable: true, Total: 64 << 30, Free: 63 << 30, DataFiles: 3,
			Fencing: "reservations", Portals: []string{"d:4420", "e:4420"}, Reason: onNamespace,
		},
	}
	want := `
  device 1a1a1a1a  nfs://10.11.12.13:20049/srv/weft  1.0 TiB free of 3.0 TiB  123456 data files  ok, load 12.3
    tls (xprtsec=mtls), 2 of 3 connections up, 1234 outstanding, mirrored data goes on without it, 123 resent, 12 JUKEBOX
    read    5.0 TiB in 1234567 requests, p50 390µs, p99 6.3ms
    written 1 B in 1 requests, p50 12ns, p99 1.5s
    connections lost 5 minutes ago and not back: 10.11.12.13:20049: refused
    2 requests failed, the last one 5 minutes ago: READ failed
  device 2b2b2b2b  nfs://b:2049/                     0 B free of 0 B          0 data files       gone, is drained, 7 files wait for it
    no connections, 0 outstanding
    1 requests failed, the last one 5 minutes ago: unknown
  device 3c3c3c3c  nfs://c:2049/                     0 B free of 0 B          0 data files       ok
  device 5e5e5e5e  nfs://e:2049/                     0 B free of 0 B          0 data files       ok for the metadata service, but does not answer 2 of the clients
  device 4d4d4d4d  nvme://d:4420/n#1                 63 GiB free of 64 GiB    3 data files       ok, fenced by reservations
    reached at d:4420, e:4420
    local: no, because it is an NVMe namespace
`
	var out strings.Builder
	printDevices(&out, devices, "  ")
	if got := "\n" + out.String(); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
}

// What a plane and its target tell is in the JSON form, under the names that scripts know.
func TestDeviceUse(t *testing.T) {
	target, err := nfs3.New(nfs3.Config{Addrs: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:2049")}, Connections: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	st := dataplane.DeviceStats{
		Device: layout.DeviceID{1}, Target: target, Outstanding: 3, Errors: 1, Err: errors.Join(errors.New("a"), errors.New("b")), ErrTime: at,
		Reads: dataplane.OpStats{Bytes: 4096, Time: 9000, Latency: dataplane.Latency{0, 0, 0, 4, 0, 1}},
	}
	b, err := json.Marshal(useOf(&st, rpctls.None))
	if err != nil {
		t.Fatal(err)
	}
	var got, want any
	none := `{"ops": 0, "bytes": 0, "time_ns": 0, "p50_ns": 0, "p99_ns": 0, "latency": []}`
	connection := `{"address": "192.0.2.1:2049", "up": false, "outstanding": 0, "ops": 0, "bytes_read": 0, "bytes_written": 0, "rtt_ns": 0, "retransmits": 0}`
	shape := `{"path": "tcp", "why": "xprtsec=none", "connections": [` + connection + `, ` + connection + `], "outstanding": 3, "down": false,
		"reads": {"ops": 5, "bytes": 4096, "time_ns": 9000, "p50_ns": 6, "p99_ns": 24, "latency": [0, 0, 0, 4, 0, 1]},
		"writes": ` + none + `, "commits": ` + none + `,
		"resent": 0, "jukebox": 0, "errors": 1, "error": "a; b", "error_at": "2026-01-02T03:04:05Z"}`
	if err := errors.Join(json.Unmarshal(b, &got), json.Unmarshal([]byte(shape), &want)); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %s\nwant %s", b, shape)
	}

	usage := usageOf([]dataplane.DeviceStats{st})
	reported := []metarpc.DeviceStats{{Device: st.Device, Reads: metarpc.IOStats{Ops: 5, Bytes: 4096, Time: 9000}, Outstanding: 3}}
	if !reflect.DeepEqual(usage, reported) {
		t.Errorf("reported %+v, want %+v", usage, reported)
	}

	// One that could not be set up has no path.
	st.Target = nil
	if u := useOf(&st, rpctls.TLS); u.Path != "" || len(u.Connections) != 0 || u.Error != "a; b" {
		t.Errorf("without a target: %+v", u)
	}
}

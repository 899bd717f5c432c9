package datafile

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/schema"
)

func TestParseURL(t *testing.T) {
	good := map[string]place{
		"nfs://10.0.0.7:2049/export":                                  {host: "10.0.0.7", port: 2049, export: "/export"},
		"nfs://ds1.example:1/a/b%20c":                                 {host: "ds1.example", port: 1, export: "/a/b c"},
		"nfs://[fe80::1]:65535/":                                      {host: "fe80::1", port: 65535, export: "/"},
		"nfs://localhost:7050/weft/ds":                                {host: "localhost", port: 7050, export: "/weft/ds"},
		"nfs://h:2049/e?mountport=20048":                              {host: "h", port: 2049, export: "/e", mountPort: 20048},
		"nvme://10.0.0.7:4420/nqn.2014-08.org.nvmexpress:uuid:5c1#1":  {host: "10.0.0.7", port: 4420, nqn: "nqn.2014-08.org.nvmexpress:uuid:5c1", nsid: 1},
		"nvme://[fe80::1]:1/nqn.2014-08.org.example:a%20b#4294967294": {host: "fe80::1", port: 1, nqn: "nqn.2014-08.org.example:a b", nsid: 1<<32 - 2},
	}
	for s, want := range good {
		got, err := parseURL(s)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", s, got, err, want)
		}
		if got.String() != s {
			t.Errorf("%s is written back as %s", s, got)
		}
	}
	if got, err := parseURL("nfs://h/e"); err != nil || got != (place{host: "h", export: "/e"}) {
		t.Errorf("without a port: %+v, %v", got, err)
	}
	if got, err := parseURL("nvme://h/nqn#2"); err != nil || got != (place{host: "h", port: nvmePort, nqn: "nqn", nsid: 2}) {
		t.Errorf("a namespace without a port: %+v, %v", got, err)
	}
	bad := map[string]string{
		"nvme://h:4420":                               "discovery controller",
		"nvme://h:4420/#1":                            "NQN is missing",
		"nvme://h:4420/nqn":                           "number of the namespace is missing",
		"nvme://h:4420/nqn#0":                         "namespace 0",
		"nvme://h:4420/nqn#4294967295":                "namespace 4294967295",
		"nvme://h:4420/nqn#a":                         "namespace a",
		"nvme://h:4420/nqn?a=1#1":                     "more than",
		"nvme://u@h:4420/nqn#1":                       "more than",
		"nvme:///nqn#1":                               "host is missing",
		"nvme://h:0/nqn#1":                            "port 0",
		"nvme://h:/nqn#1":                             "port is missing",
		"nvme:h":                                      "more than",
		"nvme://h/" + strings.Repeat("n", 224) + "#1": "224 bytes",
		"":                                       "nfs://",
		"10.0.0.7:/export":                       "data server",
		"http://h:1/e":                           "nfs://",
		"nfs://h:/export":                        "port is missing",
		"nfs://h:1/e?mountport=0":                "mountport",
		"nfs://h:1/e?mountport=1&mountport=2":    "mountport",
		"nfs://:2049/export":                     "host is missing",
		"nfs://h:2049":                           "export is missing",
		"nfs://h:0/e":                            "port 0",
		"nfs://h:65536/e":                        "port 65536",
		"nfs://h:x/e":                            "port",
		"nfs://u@h:1/e":                          "more than",
		"nfs://h:1/e?vers=3":                     "vers",
		"nfs://h:1/e#f":                          "more than",
		"nfs://h:1/" + strings.Repeat("e", 1024): "1025 bytes",
	}
	for s, want := range bad {
		if got, err := parseURL(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want an error with %q", s, got, err, want)
		}
	}
}

func TestAddDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		e := w.exports[0]
		first := w.m.Devices(t.Context())[0]
		if !first.Reachable || first.Problem != "" || first.URL != e.URL() || first.Total == 0 || first.Device.WSize != 1<<20 ||
			len(first.Device.Addrs) != 1 || first.Device.Addrs[0] != "10.0.0.1:2049" {
			t.Fatalf("new device: %+v", first)
		}

		again, err := w.m.AddDevice(t.Context(), e.URL(), false)
		if err != nil || again.Device.ID != first.Device.ID || len(w.m.all()) != 1 {
			t.Errorf("added twice: %+v, %v", again, err)
		}

		w.restart()
		again, err = w.m.AddDevice(t.Context(), e.URL(), false)
		if err != nil || again.Device.ID != first.Device.ID || !again.Reachable {
			t.Errorf("after a restart: %+v, %v", again, err)
		}

		// It moves while the service is away, and is added at its new address before anybody noticed.
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		e.Move("10.0.0.1:3049")
		w.start(w.engine)
		moved, err := w.m.AddDevice(t.Context(), e.URL(), false)
		if err != nil || moved.Device.ID != first.Device.ID || moved.Device.Addrs[0] != "10.0.0.1:3049" || !moved.Reachable {
			t.Errorf("moved: %+v, %v", moved, err)
		}
		w.file(5, layout.Policy{}, 10)

		// And while it runs.
		e.Move("10.0.0.1:4049")
		moved, err = w.m.AddDevice(t.Context(), e.URL(), false)
		if err != nil || moved.Device.ID != first.Device.ID || !moved.Reachable {
			t.Errorf("moved while in use: %+v, %v", moved, err)
		}
		w.file(6, layout.Policy{}, 10)
		calm()
		w.check()

		w.restart()
		time.Sleep(time.Second)
		if d := w.m.Devices(t.Context()); len(d) != 1 || d[0].URL != e.URL() || !d[0].Reachable || d[0].DataFiles != 2 {
			t.Errorf("after the last restart: %+v", d)
		}
	})
}

func TestAddDeviceFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		e := w.exports[0]
		id := w.m.Devices(t.Context())[0].Device.ID

		if _, err := w.m.AddDevice(t.Context(), "nfs://10.0.0.1:2049", false); err == nil {
			t.Error("bad URL accepted")
		}
		if _, err := w.m.AddDevice(t.Context(), "nfs://10.0.0.1:2049/other", false); err == nil {
			t.Error("export that does not exist accepted")
		}
		if _, err := w.m.AddDevice(t.Context(), "nfs://10.9.9.9:2049/export", false); !errors.Is(err, storetest.ErrRefused) {
			t.Errorf("server that does not exist: %v", err)
		}
		if n := len(w.m.all()); n != 1 {
			t.Errorf("%d devices after failures", n)
		}

		e.SetDown(true)
		info, err := w.m.AddDevice(t.Context(), e.URL(), false)
		if err != nil || info.Device.ID != id {
			t.Errorf("known device that is down: %+v, %v", info, err)
		}
		e.SetDown(false)
		time.Sleep(time.Minute)

		// Somebody forgot to mount the disk.
		e.Wipe()
		_, err = w.m.AddDevice(t.Context(), e.URL(), false)
		if err == nil || !strings.Contains(err.Error(), id.String()) {
			t.Errorf("wiped export: %v", err)
		}
		time.Sleep(time.Minute)
		if info := w.m.Devices(t.Context())[0]; info.Reachable || !strings.Contains(info.Problem, "since") {
			t.Errorf("wiped device: %+v", info)
		}
	})
}

// Two data servers come back with each other's address.
func TestSwappedAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		a, b := w.device(0), w.device(1)
		rows := []schema.Layout{w.file(5, layout.Policy{StripeCount: 2}, 4<<20)}
		w.exports[0].Move("10.0.0.9:1")
		w.exports[1].Move("10.0.0.1:2049")
		w.exports[0].Move("10.0.0.2:2049")

		info, err := w.m.AddDevice(t.Context(), w.exports[0].URL(), false)
		if err != nil || info.Device.ID != a.id {
			t.Fatalf("first one moved: %+v, %v", info, err)
		}
		info, err = w.m.AddDevice(t.Context(), w.exports[1].URL(), false)
		if err != nil || info.Device.ID != b.id || !info.Reachable {
			t.Fatalf("second one moved: %+v, %v", info, err)
		}
		if _, err := w.m.Sync(t.Context(), rows[0]); err != nil {
			t.Error(err)
		}
		calm()
		for _, info := range w.m.Devices(t.Context()) {
			if !info.Reachable {
				t.Errorf("%+v", info)
			}
		}
		w.check()
	})
}

func TestDeviceDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		calm()
		w.exports[0].SetDown(true)
		time.Sleep(time.Minute)
		down := w.device(0)
		for _, info := range w.m.Devices(t.Context()) {
			if bad := info.Device.ID == down.id; info.Reachable == bad || strings.Contains(info.Problem, "no answer") != bad {
				t.Errorf("%+v", info)
			}
		}
		// New files avoid it, however many.
		for id := layout.FileID(10); id < 30; id++ {
			if row := w.file(id, layout.Policy{StripeCount: 4}, 10<<20); row.Width != 1 || row.Mirrors[0][0].Device == down.id {
				t.Errorf("inode %d: %+v", id, row)
			}
		}
		w.exports[1].SetDown(true)
		time.Sleep(time.Minute)
		if _, err := w.m.Assign(t.Context(), 40, w.inode(40, layout.Policy{}), 0, 1, session, false, nil, nil); !errors.Is(err, ErrNoDevice) {
			t.Errorf("all down: %v", err)
		}

		// A restart with one of them still down does not wait for it.
		w.exports[1].SetDown(false)
		w.restart()
		begin := time.Now()
		w.file(41, layout.Policy{}, 1)
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("first file after a restart took %v", took)
		}
		w.exports[0].SetDown(false)
		time.Sleep(time.Minute)
		if row := w.file(42, layout.Policy{}, 10<<20); row.Width != 2 {
			t.Errorf("both up again: %+v", row)
		}
		calm()
		w.check()
	})
}

func TestNoDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 0)
		if _, err := w.m.Assign(t.Context(), 5, w.inode(5, layout.Policy{}), 0, 1, session, false, nil, nil); !errors.Is(err, ErrNoDevice) {
			t.Errorf("%v", err)
		}
		if devices := w.m.Devices(t.Context()); len(devices) != 0 {
			t.Errorf("%+v", devices)
		}
		if total, free, avail := w.m.StatFS(); total|free|avail != 0 {
			t.Errorf("StatFS %d %d %d", total, free, avail)
		}
	})
}

func TestSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		const mib = 1 << 20
		w.exports[0].SetSpace(1000*mib, 5*mib, false) // under a hundredth
		w.exports[1].SetSpace(1000*mib, 500*mib, false)
		time.Sleep(refresh + time.Second)
		if total, free, avail := w.m.StatFS(); total != 2000*mib || free != 505*mib || avail != 505*mib {
			t.Errorf("StatFS %d %d %d", total, free, avail)
		}
		for id := layout.FileID(10); id < 20; id++ {
			if row := w.file(id, layout.Policy{}, 1); row.Mirrors[0][0].Device != w.device(1).id {
				t.Errorf("inode %d is on the device without space", id)
			}
		}
		// The last hundredth is used when there is nothing else.
		w.exports[1].SetSpace(1000*mib, 0, false)
		time.Sleep(refresh + time.Second)
		if row := w.file(20, layout.Policy{}, 1); row.Mirrors[0][0].Device != w.device(0).id {
			t.Errorf("inode 20 is on the full device")
		}
		// All full.
		w.exports[0].SetSpace(1000*mib, 0, false)
		time.Sleep(refresh + time.Second)
		_, err := w.m.Assign(t.Context(), 21, w.inode(21, layout.Policy{}), 0, 1, session, false, nil, nil)
		if !errors.Is(err, syscall.ENOSPC) || !errors.Is(err, ErrNoSpace) {
			t.Errorf("all full: %v", err)
		}
		// A file that is there may go on, on the server it has.
		row, err := w.m.Assign(t.Context(), 20, schema.Inode{}, 0, 10*mib, session, false, nil, nil)
		if err != nil || row.Width != 1 || len(row.Mirrors[0]) != 1 {
			t.Errorf("file that grows on full devices: %+v, %v", row, err)
		}
		w.exports[1].SetSpace(1000*mib, 500*mib, false)
		time.Sleep(refresh + time.Second)
		w.file(21, layout.Policy{}, 1)
		calm()
		w.check()
	})
}

// A data server that says it has space, but refuses to make files.
func TestRefusedCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		calm()
		w.exports[0].SetSpace(1<<40, 1<<39, true)
		var err error
		made := 0
		for id := layout.FileID(10); err == nil; id++ {
			if made++; made > 10*testPool {
				t.Fatal("files are made on a device that refuses")
			}
			_, err = w.m.Assign(t.Context(), id, w.inode(id, layout.Policy{}), 0, 1, session, false, nil, nil)
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("refused: %v", err)
		}
		if info := w.m.Devices(t.Context())[0]; !strings.Contains(info.Problem, "NFS3ERR_NOSPC") {
			t.Errorf("%+v", info)
		}
		w.exports[0].SetSpace(1<<40, 1<<39, false)
		time.Sleep(refusedWait + time.Second)
		w.file(100, layout.Policy{}, 1)
		calm()
		if info := w.m.Devices(t.Context())[0]; info.Problem != "" {
			t.Errorf("%+v", info)
		}
		w.check()
	})
}

// Two exports of one host that share a file system.
func TestSharedFileSystem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		d := w.device(0)
		w.m.mu.Lock()
		defer w.m.mu.Unlock()
		twin := newDevice(w.m, layout.DeviceID{9}, d.row, nil)
		twin.stat = d.stat
		w.m.devices = append(w.m.devices, twin)
		w.m.mu.Unlock()
		total, _, _ := w.m.StatFS()
		w.m.mu.Lock()
		w.m.devices = w.m.devices[:1]
		if total != 1<<40 {
			t.Errorf("total %d", total)
		}
	})
}

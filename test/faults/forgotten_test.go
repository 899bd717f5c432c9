package faults

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// firewall lets the packets of those TCP connections to a port pass whose beginning it has seen, and that it remembers.
// It drops all others, and does not say so. So does NAT.
type firewall struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Scanner
}

// newFirewall begins to look at a port. It belongs into a network namespace of the test's own.
func newFirewall(t *testing.T, port string) *firewall {
	t.Helper()
	harness.Run(t, "", "nft", strings.ReplaceAll(`
		add set inet weft known { type inet_service . inet_service; flags dynamic; size 65535; }
		add rule inet weft in tcp dport PORT tcp flags & (syn | ack) == syn update @known { tcp sport . tcp dport }
		add rule inet weft in tcp dport PORT tcp sport . tcp dport != @known drop
		add rule inet weft in tcp sport PORT tcp dport . tcp sport != @known drop`, "PORT", port))
	// A process that has files of a mount open cannot start others while that waits for a data server.
	in, out := startPiped(t, exec.Command("sh", "-c", "while read line; do nft flush set inet weft known; echo $?; done"))
	return &firewall{t, in, bufio.NewScanner(out)}
}

// forget has it remember no connection.
func (f *firewall) forget() {
	fmt.Fprintln(f.in)
	if !f.out.Scan() || f.out.Text() != "0" {
		f.t.Errorf("nft: exit code %q, %v", f.out.Text(), f.out.Err())
	}
}

// TestForgottenConnections has a firewall between a mount and a data server forget their connections, with requests on
// them and without. The mount makes others long before timeo is over.
func TestForgottenConnections(t *testing.T) {
	harness.NeedMount(t)
	if !ownNetwork(t, "TestForgottenConnections") {
		return
	}
	const within = 30 * time.Second // half of timeo
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true})
	d := v.Servers[0]
	wall := newFirewall(t, d.Port())
	m := v.Mount(mountOptions()...)
	data := bytes.Repeat([]byte("weft"), 1<<20)
	f, err := os.Create(filepath.Join(m.Dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(what string) {
		t.Helper()
		began := time.Now()
		_, err := f.WriteAt(data, 0)
		if err == nil {
			err = f.Sync()
		}
		if took := time.Since(began); err != nil || took > within {
			t.Errorf("%s: %v after %v", what, err, took)
		} else {
			t.Logf("%s: %v", what, took.Round(time.Millisecond))
		}
	}
	write("before")
	for range 2 {
		wall.forget()
		write("forgotten")
	}
	if log := m.Log(); !strings.Contains(log, "no packet for") {
		t.Errorf("the mount does not say why its connections were lost:\n%s", log)
	}

	// Requests that the server has are no reason to wait for it.
	d.Pause()
	go func() { // ends before the next write
		time.Sleep(500 * time.Millisecond)
		wall.forget()
		d.Continue()
	}()
	write("forgotten while the server works")

	// The mount may ask the data server by itself, as the metadata service has found it down, and so make others.
	forgotten := time.Now()
	wall.forget()
	harness.Await(t, "connections that nobody uses are found dead", func() bool {
		var st []struct {
			Devices []struct {
				Mount struct {
					Connections []struct {
						Up    bool
						Since time.Time
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(harness.Weft(t, "status", "--json", m.Dir)), &st); err != nil {
			t.Fatal(err)
		}
		for _, c := range st[0].Devices[0].Mount.Connections {
			if c.Up && c.Since.Before(forgotten) {
				return false
			}
		}
		return len(st[0].Devices[0].Mount.Connections) > 0
	})
	write("found dead before")
	f.Close()
	m.Unmount()
}

// TestOriginalsForgotten: WRITEs are in the sockets of a data server that is stopped when a firewall forgets their
// connections. When the server goes on, no such WRITE is carried out after its repetition was answered.
func TestOriginalsForgotten(t *testing.T) {
	harness.NeedMount(t)
	if !ownNetwork(t, "TestOriginalsForgotten") {
		return
	}
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true})
	d := v.Servers[0]
	wall := newFirewall(t, d.Port())
	stop := func() {
		d.Pause()
		go func() { // ends while the connections are waited for
			time.Sleep(500 * time.Millisecond)
			wall.forget()
		}()
	}
	originals(t, v, 1, "timeo=600", stop, d.Continue)
}

package interop

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/nvmeauth/nvmeauthtest"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"
	"github.com/weftfs/weft/test/harness"
)

const nvmeNQN = "nqn.2026-01.io.weft:interop"

// nvmeTarget starts our target with one subsystem at two ports: namespace 1 of 512-byte blocks in ANA group 1, namespace 2 of
// 4096-byte blocks in group 2, and returns it with a script that sets P1 and P2 to the ports.
func nvmeTarget(t *testing.T) (*nvmetest.Target, string) {
	t.Helper()
	dir := harness.Dir(t)
	cfg := nvme.Config{Subsystems: []nvme.Subsystem{{NQN: nvmeNQN, Serial: "interop", AnyHost: true}}}
	for i, size := range []uint32{512, 4096} {
		f := nvmeFile(t, filepath.Join(dir, fmt.Sprint("ns", i)), 64<<20)
		cfg.Subsystems[0].Namespaces = append(cfg.Subsystems[0].Namespaces, nvme.Namespace{
			NSID: uint32(i + 1), Backing: f, BlockSize: size, ANAGroup: uint32(i + 1), NGUID: [16]byte{0x77, 15: byte(i)}, UUID: [16]byte{0x78, 15: byte(i)},
		})
	}
	for id := range uint16(2) {
		addr := harness.FreeAddr(t)
		_, port, _ := net.SplitHostPort(addr)
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: id + 1, Listen: addr, Advertise: "10.0.2.2:" + port, HeaderDigest: true, DataDigest: true})
	}
	tgt, err := nvmetest.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := tgt.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	vars := fmt.Sprintf("NQN=%s\n", nvmeNQN)
	for id := range uint16(2) {
		_, port, _ := net.SplitHostPort(tgt.Addr(id + 1))
		vars += fmt.Sprintf("P%d=%s\n", id+1, port)
	}
	return tgt, vars + nvmeShell
}

// nvmeShell is what scripts for the guest begin with.
const nvmeShell = `
	dev() { # the multipath device of namespace $1
		for d in /sys/class/block/nvme[0-9]n[0-9]; do
			[ "$(cat "$d/nsid")" = "$1" ] && basename "$d" && return
		done
		return 1
	}
	await() { # until the command succeeds
		i=0
		until "$@"; do i=$((i+1)); [ $i -lt 300 ] || { echo "gave up: $*"; return 1; }; sleep 0.1; done
	}
`

func nvmeFile(t *testing.T, path string, size int64) *nvme.File {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	f, err := nvme.OpenFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// TestKernelInitiator has the kernel's NVMe/TCP initiator use our target: discovery, data with digests on and off, events, and
// ANA.
func TestKernelInitiator(t *testing.T) {
	harness.StartVM(t)
	tgt, vars := nvmeTarget(t)
	run := func(script string) string { t.Helper(); return harness.Guest(t, vars+script) }

	out := run(`nvme discover -t tcp -a 10.0.2.2 -s $P1`)
	if n := strings.Count(out, nvmeNQN); n != 2 {
		t.Errorf("discovery shows the subsystem %d times, want at two ports:\n%s", n, out)
	}
	for _, digests := range []string{"", "--hdr-digest", "--data-digest", "--hdr-digest --data-digest"} {
		run(`
			nvme connect -t tcp -a 10.0.2.2 -s $P1 -n $NQN --nr-io-queues=2 ` + digests + `
			await dev 1 >/dev/null; await dev 2 >/dev/null
			for n in 1 2; do
				fio --name=v --filename=/dev/$(dev $n) --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw --bsrange=4k-1m --size=24m \
					--verify=crc32c --verify_fatal=1 --do_verify=1 --end_fsync=1 --randrepeat=0 >/tmp/fio.log || { cat /tmp/fio.log; exit 1; }
				blkdiscard -o 1m -l 1m /dev/$(dev $n)
				blkdiscard -z -o 3m -l 2m /dev/$(dev $n)
				cmp -n 1048576 -i 1048576:0 /dev/$(dev $n) /dev/zero
				cmp -n 2097152 -i 3145728:0 /dev/$(dev $n) /dev/zero
			done
			nvme id-ctrl /dev/$(dev 1) >/dev/null
			nvme disconnect-all`)
	}
	if out := run(`dmesg | grep -i 'nvme.*\(error\|fail\|invalid\|digest\|timeout\)' | grep -v 'nvmet' || true`); out != "" {
		t.Errorf("the guest's kernel says:\n%s", out)
	}

	// Both ports: states of groups, and what comes and goes while it is connected.
	run(`
		nvme connect-all -t tcp -a 10.0.2.2 -s $P1 --nr-io-queues=1
		await dev 1 >/dev/null; await dev 2 >/dev/null
		(fio --name=load --filename=/dev/$(dev 1) --direct=1 --ioengine=libaio --iodepth=4 --rw=randrw --bsrange=4k-64k --size=16m --time_based --runtime=20 \
			--verify=crc32c --verify_fatal=1 --verify_backlog=64 >/tmp/load.log 2>&1; echo $? >/tmp/load.rc) >/dev/null 2>&1 </dev/null &
		sleep 1`)
	for _, state := range []wire.ANAState{wire.ANAInaccessible, wire.ANANonOptimized, wire.ANAChange, wire.ANALoss, wire.ANAOptimized} {
		for _, port := range []uint16{1, 2} {
			if err := tgt.SetANA(port, 1, state); err != nil {
				t.Fatal(err)
			}
			run(fmt.Sprintf(`await sh -c 'cat /sys/class/block/nvme*c*n*/ana_state | grep -qx %v'`, state))
			if err := tgt.SetANA(port, 1, wire.ANAOptimized); err != nil {
				t.Fatal(err)
			}
			run(fmt.Sprintf(`await sh -c '! cat /sys/class/block/nvme*c*n*/ana_state | grep -vqx %v'`, wire.ANAOptimized))
		}
	}
	f := nvmeFile(t, filepath.Join(harness.Dir(t), "ns3"), 8<<20)
	if err := tgt.AddNamespace(nvmeNQN, nvme.Namespace{NSID: 3, Backing: f, BlockSize: 4096, ANAGroup: 3, NGUID: [16]byte{0x79}}); err != nil {
		t.Fatal(err)
	}
	run(`await dev 3 >/dev/null; [ "$(blockdev --getsize64 /dev/$(dev 3))" = $((8<<20)) ]`)
	if err := os.Truncate(filepath.Join(filepath.Dir(fileName(t, f)), "ns3"), 16<<20); err != nil {
		t.Fatal(err)
	}
	if err := tgt.Resize(nvmeNQN, 3); err != nil {
		t.Fatal(err)
	}
	run(`grown() { [ "$(blockdev --getsize64 /dev/$(dev 3))" = $((16<<20)) ]; }; await grown`)
	if err := tgt.RemoveNamespace(nvmeNQN, 3); err != nil {
		t.Fatal(err)
	}
	run(`gone() { ! dev 3 >/dev/null; }; await gone`)
	if err := tgt.PortDown(2); err != nil {
		t.Fatal(err)
	}
	run(`sleep 1`)
	if err := tgt.PortUp(2); err != nil {
		t.Fatal(err)
	}
	if out := run(`ended() { [ -s /tmp/load.rc ]; }; await ended; cat /tmp/load.rc; cat /tmp/load.log >&2`); strings.TrimSpace(out) != "0" {
		t.Errorf("fio under all of this ended with %s", out)
	}
	run(`nvme disconnect-all`)
}

// TestKernelInitiatorSecrets has the kernel's initiator authenticate itself, and use reservations.
func TestKernelInitiatorSecrets(t *testing.T) {
	harness.StartVM(t)
	tgt, vars := nvmeTarget(t)
	name := strings.TrimSpace(harness.Guest(t, "cat /etc/nvme/hostnqn"))
	h := nvme.Host{NQN: name, Secret: nvmeauthtest.NewSecret(nvmeauth.SHA256), ControllerSecret: nvmeauthtest.NewSecret(nvmeauth.SHA512)}
	if err := tgt.AllowHost(nvmeNQN, h); err != nil {
		t.Fatal(err)
	}
	wrong := nvmeauthtest.NewSecret(nvmeauth.SHA256)
	harness.Guest(t, vars+fmt.Sprintf(`
		S=%s C=%s W=%s
		connect() { nvme connect -t tcp -a 10.0.2.2 -s $P1 -n $NQN --nr-io-queues=2 "$@"; }
		check() { await dev 1 >/dev/null; dd if=/dev/$(dev 1) of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null; nvme disconnect-all; }
		connect --dhchap-secret=$S; check
		connect --dhchap-secret=$S --dhchap-ctrl-secret=$C; check
		! connect --dhchap-secret=$W
		! connect --dhchap-secret=$S --dhchap-ctrl-secret=$W
		! connect
		[ -z "$(dev 1)" ]`, h.Secret.Text(), h.ControllerSecret.Text(), wrong.Text()))
	if err := tgt.AllowHost(nvmeNQN, nvme.Host{NQN: name}); err != nil {
		t.Fatal(err)
	}
	out := harness.Guest(t, vars+`
		nvme connect -t tcp -a 10.0.2.2 -s $P1 -n $NQN --nr-io-queues=2
		await dev 1 >/dev/null
		D=/dev/$(dev 1)
		nvme resv-register $D --nrkey=0x11 --rrega=0 --cptpl=0
		nvme resv-acquire $D --crkey=0x11 --rtype=1 --racqa=0
		nvme resv-report $D -e
		dd if=/dev/zero of=$D bs=64k count=1 oflag=direct 2>/dev/null
		nvme resv-release $D --crkey=0x11 --rtype=1 --rrela=0
		nvme disconnect-all`)
	for _, want := range []string{"rtype *: *1", "rkey *: *0?x?11", "regctl *: *1"} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("the report has no %q:\n%s", want, out)
		}
	}
}

func fileName(t *testing.T, f *nvme.File) string {
	t.Helper()
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Buffered()))
	if err != nil {
		t.Fatal(err)
	}
	return name
}

package interop

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// TestNVMeCompare has the kernel's initiator and ours do the same on the same namespace, all in the virtual machine: one of our
// target and one of the kernel's, over one path. It prints what they do, the medians of three turns.
func TestNVMeCompare(t *testing.T) {
	share := harness.Dir(t)
	build := exec.Command("go", "build", "-trimpath", "-o", share, "./test/bench")
	build.Dir, build.Env = harness.Root, append(build.Environ(), "CGO_ENABLED=0", "GOAMD64=v1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	ports := startVM(t, "--share", share)
	// Its first line is the address. The file is as large as what the jobs use.
	ours := strings.TrimSpace(guest(t, nvmeShell+`
		truncate -s 512m /tmp/namespace
		/share/bench serve-nvme 1 /tmp/namespace >/tmp/address 2>&1 </dev/null &
		await test -s /tmp/address
		cat /tmp/address`))
	for _, target := range []struct {
		name, addr, nqn string
		nsid            int
	}{
		{"our target", ours, "nqn.2024-01.io.github.weftfs:bench", 1},
		{"the kernel's", "127.0.0.1:" + strings.Fields(ports["LAB_NVME_PORTS"])[1], ports["LAB_NQN1"], 2}, // the second port is best for it
	} {
		addr, port, _ := strings.Cut(target.addr, ":")
		device := strings.TrimSpace(guest(t, nvmeShell+fmt.Sprintf(`
			nvme connect -t tcp -a %s -s %s -n %s --nr-io-queues=2 >&2
			await dev %d >/dev/null
			dd if=/dev/zero of=/dev/$(dev %[4]d) bs=1M count=512 oflag=direct status=none
			echo /dev/$(dev %[4]d)`, addr, port, target.nqn, target.nsid)))
		for _, job := range []struct {
			rw, unit    string
			size, depth int
		}{{"read", "MB/s", 1 << 20, 16}, {"write", "MB/s", 1 << 20, 16}, {"randread", "IOPS", 4 << 10, 32}} {
			var kernel, weft []float64
			for range 3 {
				kernel = append(kernel, guestFio(t, "--filename="+device, "--rw="+job.rw, fmt.Sprint("--bs=", job.size), fmt.Sprint("--iodepth=", job.depth)))
				out := guest(t, fmt.Sprintf("/share/bench load-nvme %s %s %d %s %d", target.addr, target.nqn, target.nsid, job.rw, job.depth))
				v, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
				if err != nil {
					t.Fatalf("load-nvme says %q", out)
				}
				weft = append(weft, v)
			}
			slices.Sort(kernel)
			slices.Sort(weft)
			t.Logf("%s, %s of %d KiB, depth %d: kernel %.0f %s, weft %.0f, ratio %.2f", target.name, job.rw, job.size>>10, job.depth,
				kernel[1], job.unit, weft[1], weft[1]/kernel[1])
		}
		guest(t, "nvme disconnect-all")
	}
}

// guestFio runs a job for two seconds and returns MB/s, or IOPS if it is of small requests.
func guestFio(t *testing.T, args ...string) float64 {
	t.Helper()
	out := guest(t, "fio --name=compare --size=512m --direct=1 --ioengine=io_uring --runtime=2 --time_based --output-format=json "+strings.Join(args, " "))
	type side struct {
		BW   float64 `json:"bw_bytes"`
		IOPS float64
	}
	var report struct{ Jobs []struct{ Read, Write side } }
	if err := json.Unmarshal([]byte(out), &report); err != nil || len(report.Jobs) != 1 {
		t.Fatalf("fio: %v\n%s", err, out)
	}
	job := report.Jobs[0]
	if slices.Contains(args, "--bs=4096") {
		return job.Read.IOPS + job.Write.IOPS
	}
	return (job.Read.BW + job.Write.BW) / 1e6
}

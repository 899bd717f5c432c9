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

// TestNVMeCompare has the kernel's initiator and ours do the same, on our target and on the kernel's, all in the virtual machine: ours
// without FUSE on the kernel's namespace, over one path, and on a file of a volume that lies on another namespace of the same
// target. It prints what they do, the medians of three turns.
func TestNVMeCompare(t *testing.T) {
	share := harness.Dir(t)
	harness.Run(t, "", "cp", harness.Bin(t, "weft"), harness.Bin(t, "weftd"), share)
	build := exec.Command("go", "build", "-trimpath", "-o", share, "./test/bench")
	build.Dir, build.Env = harness.Root, append(build.Environ(), "CGO_ENABLED=0", "GOAMD64=v1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	ports := harness.StartVM(t, "--share", share)
	serve := func(name string) string {
		return strings.TrimSpace(harness.Guest(t, nvmeShell+fmt.Sprintf(`
			truncate -s 512m /tmp/%s
			/share/bench serve-nvme 1 /tmp/%[1]s >/tmp/%[1]s.address 2>&1 </dev/null &
			await test -s /tmp/%[1]s.address
			cat /tmp/%[1]s.address`, name)))
	}
	const ours = "nqn.2024-01.io.github.weftfs:bench"
	kernels, tcp := ports["LAB_NQN1"], strings.Fields(ports["LAB_NVME_PORTS"])
	for i, target := range []struct {
		name, addr, nqn string
		nsid            int
		volume          string
	}{
		{"our target", serve("bare"), ours, 1, "nvme://" + serve("volume") + "/" + ours + "#1"},
		// Each of its namespaces is at its best at a port of its own.
		{"the kernel's target", "127.0.0.1:" + tcp[1], kernels, 2, "nvme://127.0.0.1:" + tcp[0] + "/" + kernels + "#1"},
	} {
		addr, port, _ := strings.Cut(target.addr, ":")
		device := strings.TrimSpace(harness.Guest(t, nvmeShell+fmt.Sprintf(`
			nvme connect -t tcp -a %s -s %s -n %s --nr-io-queues=2 >&2
			await dev %d >/dev/null
			echo /dev/$(dev %[4]d)`, addr, port, target.nqn, target.nsid)))
		file := fmt.Sprintf("/mnt/weft%d/file", i)
		harness.Guest(t, nvmeShell+fmt.Sprintf(`
			mkdir -p /tmp/meta%d /mnt/weft%[1]d
			SERVER=127.0.0.1:700%[1]d
			setsid /share/weftd meta --dir /tmp/meta%[1]d --listen $SERVER >/tmp/weftd.log 2>&1 </dev/null &
			await /share/weft admin device ls --server $SERVER >/tmp/ls.log 2>&1
			/share/weft admin device add --server $SERVER '%s'
			/share/weft mount $SERVER:/ /mnt/weft%[1]d`, i, target.volume))
		for _, name := range []string{device, file} {
			harness.Guest(t, "dd if=/dev/zero of="+name+" bs=1M count=256 oflag=direct status=none")
		}
		for _, job := range []struct {
			rw, unit    string
			size, depth int
		}{{"read", "MB/s", 1 << 20, 16}, {"write", "MB/s", 1 << 20, 16}, {"randread", "IOPS", 4 << 10, 32}} {
			var kernel, bare, weft []float64
			for range 3 {
				args := []string{"--rw=" + job.rw, fmt.Sprint("--bs=", job.size), fmt.Sprint("--iodepth=", job.depth), "--size=256m"}
				kernel = append(kernel, guestFio(t, append(args, "--filename="+device)...))
				weft = append(weft, guestFio(t, append(args, "--filename="+file)...))
				out := harness.Guest(t, fmt.Sprintf("/share/bench load-nvme %s %s %d %s %d", target.addr, target.nqn, target.nsid, job.rw, job.depth))
				v, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
				if err != nil {
					t.Fatalf("load-nvme says %q", out)
				}
				bare = append(bare, v)
			}
			for _, v := range [][]float64{kernel, bare, weft} {
				slices.Sort(v)
			}
			t.Logf("%s, %s of %d KiB, depth %d: kernel %.0f %s, weft without FUSE %.0f (%.2f), weft %.0f (%.2f)", target.name, job.rw, job.size>>10, job.depth,
				kernel[1], job.unit, bare[1], bare[1]/kernel[1], weft[1], weft[1]/kernel[1])
		}
		harness.Guest(t, fmt.Sprintf("/share/weft umount /mnt/weft%d; nvme disconnect-all", i))
	}
}

// guestFio runs a job for two seconds and returns MB/s, or IOPS if it is of small requests.
func guestFio(t *testing.T, args ...string) float64 {
	t.Helper()
	out := harness.Guest(t, "fio --name=compare --direct=1 --ioengine=io_uring --runtime=2 --time_based --output-format=json "+strings.Join(args, " "))
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

package interop

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// member is a data server of a volume that can be taken away and comes back.
type member struct {
	name, url   string
	leave, back func()
}

// ourServer is a weftd data.
func ourServer(t *testing.T) member {
	dir, addr := harness.Dir(t), harness.FreeAddr(t)
	var p *harness.Proc
	start := func() {
		p = harness.Spawn(t, "weftd", "data", "--dir", dir, "--listen", addr)
		harness.AwaitListen(t, addr)
	}
	start()
	return member{"weftd data at " + addr, "nfs://" + addr + "/", func() { p.End(syscall.SIGKILL) }, start}
}

// members are two NFS-Ganesha, a weftd data, and the kernel's server in the virtual machine, for which a second weftd data stands
// in where there is none.
func members(t *testing.T) []member {
	aloneWithGanesha(t)
	all := []member{ourServer(t)}
	for range 2 {
		dir := harness.Dir(t)
		g := newGanesha(t, export{dir, open})
		all = append(all, member{"NFS-Ganesha at port " + g.nfs, "nfs://127.0.0.1:" + g.nfs + dir + "?mountport=" + g.mount, g.kill, g.start})
	}
	if !*harness.Lab {
		return append(all, ourServer(t))
	}
	ports := harness.StartVM(t)
	return append(all, member{
		"the kernel's server", "nfs://" + ports["LAB_HOST"] + ":" + ports["LAB_NFS_PORT"] + "/export/ds0?mountport=" + ports["LAB_MOUNTD_PORT"],
		func() { harness.Guest(t, "lab nfsd stop") }, func() { harness.Guest(t, "lab nfsd start") },
	})
}

// TestMixedServers has a volume with two copies of everything on data servers of several makes. It holds the model and real trees,
// and any one of the servers may be killed and come back under load without an error.
func TestMixedServers(t *testing.T) {
	harness.Need(t, "fio", "rsync")
	all := members(t)
	var urls []string
	for _, m := range all {
		urls = append(urls, m.url)
	}
	t.Setenv(harness.ServersEnv, strings.Join(urls, " "))

	t.Run("model", func(t *testing.T) {
		ops := "240"
		if *harness.Lab {
			ops = "2400"
		}
		cmd := exec.Command("go", "test", "-count", "1", "-timeout", "50m", "./test/model", "-args", "-mirrors", "2", "-ops", ops)
		cmd.Dir = harness.Root
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	})

	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount("mirror-timeout=2s")
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-unit", "64KiB", "--stripe-count", "2", "--mirrors", "2")
	t.Run("tree", func(t *testing.T) {
		src := filepath.Join(harness.Root, "internal")
		harness.Run(t, m.Dir, "cp", "-a", src, "copied")
		harness.Run(t, m.Dir, "diff", "-r", src, "copied")
		harness.Run(t, m.Dir, "rsync", "-aHAX", src+"/", "synced")
		harness.Run(t, m.Dir, "diff", "-r", src, "synced")
	})
	for i, d := range all {
		t.Run(fmt.Sprint("loss", i), func(t *testing.T) {
			t.Log(d.name)
			dir := filepath.Join(m.Dir, fmt.Sprint("loss", i))
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			load := exec.Command("fio", "--name=v", "--rw=randwrite", "--bsrange=4k-256k", "--size=24m", "--fsync=16", "--rate=2m",
				"--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--end_fsync=1", "--nrfiles=4")
			load.Dir, load.Stdout, load.Stderr = dir, &out, &out
			if err := load.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { load.Process.Kill() })
			time.Sleep(time.Second)
			d.leave()
			// What was written before is all there without it, and new things can be made.
			harness.Run(t, m.Dir, "diff", "-r", filepath.Join(harness.Root, "internal"), "copied")
			harness.Run(t, m.Dir, "cp", "-a", filepath.Join(harness.Root, "layout"), dir)
			if err := load.Wait(); err != nil {
				t.Errorf("fio: %v\n%s", err, out.Bytes())
			}
			harness.Run(t, dir, "diff", "-r", filepath.Join(harness.Root, "layout"), "layout")
			d.back()
			m.AwaitCopies()
		})
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}

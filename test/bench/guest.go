package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// The rows in the virtual machine of test/lab.

const (
	kernelName = "kernel NFSv3, nconnect=4"
	guestName  = "bench"
)

// guest is a virtual machine in which the kernel's client and weft have a file each on the machine's own NFS server.
type guest struct {
	vm    string         // test/lab/vm
	stdin io.WriteCloser // of down, which waits for its end
	down  *exec.Cmd
}

// guestSetup mounts both and writes the files.
const guestSetup = `set -e
mkdir -p /tmp/meta /mnt/weft
setsid /share/weftd meta --dir /tmp/meta --listen 127.0.0.1:7000 >/tmp/weftd.log 2>&1 </dev/null &
timeout 30 sh -c 'until /share/weft admin device ls --server 127.0.0.1:7000; do sleep 0.1; done' >/dev/null 2>&1
/share/weft admin device add --server 127.0.0.1:7000 nfs://127.0.0.1/export/ds1
/share/weft mount -o nconnect=4 127.0.0.1:7000:/ /mnt/weft
lab mount 0
for dir in /mnt/weft /mnt/ds0; do (cd $dir && fio %s); done`

// onGuest measures a fio job on weft against the same job on the kernel's client.
func onGuest(w workload, depth int) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		if l.vm == nil {
			if err := l.startGuest(); err != nil {
				return f, err
			}
		}
		job := append(guestJob(w.rw(), fmt.Sprint("--bs=", w.size), "--ioengine=io_uring", fmt.Sprint("--iodepth=", depth)),
			"--runtime=5", "--time_based")
		if f.weft, err = l.vm.fio(w, "/mnt/weft", job); err == nil {
			f.baseline, err = l.vm.fio(w, "/mnt/ds0", job)
		}
		return f, err
	}
}

// guestJob is a job on a file that the machine's memory has room for.
func guestJob(args ...string) []string { return fioArgs("file", append(args, "--size=64m")...) }

// startGuest starts the machine, which ends with the lab, and at the latest with this process.
func (l *lab) startGuest() error {
	root := filepath.Dir(l.bin)
	g := &guest{vm: filepath.Join(root, "test/lab/vm")}
	if exec.Command(g.vm, "status", "--name", guestName).Run() == nil {
		return fmt.Errorf("there is a virtual machine %s already; %s down --name %[1]s ends it", guestName, g.vm)
	}
	share := filepath.Join(l.disk, "share")
	build := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-o", share+"/", "./cmd/weft", "./cmd/weftd")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0", "GOAMD64=v1")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w: %s", err, out)
	}
	g.down = exec.Command("sh", "-c", `cat; exec "$0" down --name "$1"`, g.vm, guestName)
	g.down.Stderr = os.Stderr
	g.down.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a signal from the terminal does not end it
	var err error
	if g.stdin, err = g.down.StdinPipe(); err != nil {
		return err
	}
	if err := g.down.Start(); err != nil {
		return err
	}
	l.vm = g
	if _, err := g.run("up", "--name", guestName, "--share", share); err != nil {
		return err
	}
	_, err = g.sh(fmt.Sprintf(guestSetup, strings.Join(guestJob("--rw=write", "--bs=1m", "--ioengine=psync"), " ")))
	return err
}

// end ends the machine.
func (g *guest) end() error { return errors.Join(g.stdin.Close(), g.down.Wait()) }

// run runs test/lab/vm and returns its standard output.
func (g *guest) run(args ...string) ([]byte, error) {
	var errs strings.Builder
	cmd := exec.Command(g.vm, args...)
	cmd.Stderr = &errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", g.vm, args[0], err, errs.String())
	}
	return out, nil
}

// sh runs a script in the machine.
func (g *guest) sh(script string) ([]byte, error) {
	return g.run("sh", "--name", guestName, script)
}

// fio runs a job in a directory of the machine.
func (g *guest) fio(w workload, dir string, job []string) (float64, error) {
	out, err := g.sh("cd " + dir + " && fio " + strings.Join(job, " "))
	if err != nil {
		return 0, err
	}
	r, err := fioReport(out)
	return w.ofFio(r), err
}

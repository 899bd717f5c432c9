package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/version"
)

const (
	doctorDial = 3 * time.Second // until an address counts as silent
	doctorSlow = 100 * time.Millisecond
	doctorLook = time.Second // between two looks at what waits in the kernel
	doctorTail = 64 << 10    // bytes of a log
)

// doctor looks at a host and its mounts. What is found goes to the report, and to the terminal with what can be done.
type doctor struct {
	ctx      context.Context
	out      io.Writer
	report   bytes.Buffer
	findings int
}

func runDoctor(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nIt works also when a mount hangs or its serving process has died. The report has versions, limits, the state of mounts, what their processes are doing, and\n" +
		"the ends of their logs: names of hosts and directories, but no keys, secrets, or contents of files. The exit code is 2 if something was found.\n")
	to := fl.String("report", "", "also write all that was looked at to this file, for a report of a bug; - is standard output")
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	mounts, err := selectMounts(fl.Args())
	if err != nil {
		return err
	}
	d := &doctor{ctx: ctx, out: os.Stdout}
	if *to == "-" {
		d.out = io.Discard
	}
	d.host()
	for _, m := range mounts {
		d.mount(m)
	}
	if len(mounts) == 0 {
		d.say("mounts", "there are no weft mounts")
	}
	switch *to {
	case "":
	case "-":
		_, err = os.Stdout.Write(d.report.Bytes())
	default:
		err = os.WriteFile(*to, d.report.Bytes(), 0o600)
	}
	switch {
	case err != nil:
		return fmt.Errorf("report: %w", err)
	case d.findings == 1:
		return errors.New("something was found")
	case d.findings > 1:
		return fmt.Errorf("%d things were found", d.findings)
	}
	return nil
}

// say notes what is as it should be, or only worth knowing.
func (d *doctor) say(what, format string, args ...any) {
	d.line("   ", what, fmt.Sprintf(format, args...))
}

// find notes what is not as it should be. The text ends with what to do.
func (d *doctor) find(what, format string, args ...any) {
	d.findings++
	d.line("!! ", what, fmt.Sprintf(format, args...))
}

func (d *doctor) line(mark, what, text string) {
	line := fmt.Sprintf("%s%-12s %s\n", mark, what, filename.Escape(text))
	io.WriteString(d.out, line)
	d.report.WriteString(line)
}

// attach adds to the report what is too long for a line.
func (d *doctor) attach(title string, text []byte) {
	fmt.Fprintf(&d.report, "\n----- %s\n%s\n-----\n\n", title, bytes.TrimSpace(text))
}

// attachFile is attach of a file, or of its end.
func (d *doctor) attachFile(name string) {
	f, err := os.Open(name)
	if err != nil {
		d.attach(name, []byte(err.Error()))
		return
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Mode().IsRegular() && st.Size() > doctorTail {
		f.Seek(-doctorTail, io.SeekEnd)
	}
	text, err := io.ReadAll(io.LimitReader(f, doctorTail))
	if err != nil {
		text = append(text, err.Error()...)
	}
	d.attach(name, text)
}

// host looks at what all mounts need.
func (d *doctor) host() {
	name, _ := os.Hostname()
	var uts unix.Utsname
	unix.Uname(&uts)
	release := unix.ByteSliceToString(uts.Release[:])
	d.say("host", "%s, weft %s, Linux %s, %d processors, user %d, %s", name, version.String(), release, runtime.NumCPU(), os.Getuid(), time.Now().Format(time.RFC3339))
	if major, minor := kernelVersion(release); major < 6 || major == 6 && minor < 9 {
		d.say("kernel", "older than 6.9: files on this host are not served by the kernel itself (passthrough)")
		if major < 6 || minor < 2 {
			d.say("kernel", "older than 6.2: it keeps no names, so each is asked for again")
		}
	} else if major == 6 && minor == 19 || major == 7 && minor == 0 {
		d.say("kernel", "6.19 and 7.0 cannot be told that a name has come to be, so one that is not there is asked for again")
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		d.find("fuse", "/dev/fuse: %v. Load the kernel's module (modprobe fuse), or give the container the device", err)
	case err != nil:
		d.find("fuse", "/dev/fuse: %v. Its mode should be 666; a container needs the device (--device /dev/fuse) and, to mount by itself, CAP_SYS_ADMIN", err)
	default:
		fuse.Close()
		d.say("fuse", "/dev/fuse can be opened")
	}
	if os.Getuid() != 0 {
		d.fusermount()
	}
	d.clock()
	d.memory()
	for _, file := range []string{"/proc/self/limits", "/etc/fuse.conf", "/proc/sys/fs/fuse/max_pages_limit"} {
		d.attachFile(file)
	}
}

// kernelVersion is 6, 18 of 6.18.5-amd64.
func kernelVersion(release string) (major, minor int) {
	a, rest, _ := strings.Cut(release, ".")
	b, _, _ := strings.Cut(rest, ".")
	b, _, _ = strings.Cut(b, "-")
	major, _ = strconv.Atoi(a)
	minor, _ = strconv.Atoi(b)
	return major, minor
}

// fusermount looks at what mounts for users.
func (d *doctor) fusermount() {
	path, err := exec.LookPath("fusermount3")
	if err != nil {
		d.find("fusermount3", "is not in PATH, and only root mounts without it. Install the package fuse3")
		return
	}
	if st, err := os.Stat(path); err == nil && st.Mode()&os.ModeSetuid == 0 {
		d.find("fusermount3", "%s is not set-user-ID root, so it cannot mount for you: chmod u+s %s", path, path)
		return
	}
	d.say("fusermount3", "%s", path)
	if conf, _ := os.ReadFile("/etc/fuse.conf"); !slices.Contains(strings.Split(string(conf), "\n"), "user_allow_other") {
		d.say("fuse.conf", "user_allow_other is not set in /etc/fuse.conf: nobody else, not even root, can use what you mount")
	}
}

// clock looks whether the time is that of other hosts.
func (d *doctor) clock() {
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	switch {
	case err != nil:
		d.say("clock", "it is not known whether it is right: %v", err)
	case state == unix.TIME_ERROR || tx.Status&unix.STA_UNSYNC != 0:
		d.say("clock", "nothing keeps it right (no NTP, as far as the kernel knows): times of files that this host writes may be ahead of those of others, or behind")
	default:
		d.say("clock", "is kept right, to %v", (time.Duration(tx.Maxerror) * time.Microsecond).Round(time.Millisecond))
	}
}

// memory looks at what there is, for a host and for a container.
func (d *doctor) memory() {
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return
	}
	d.attach("/proc/meminfo", info)
	free := uint64(0)
	for line := range strings.Lines(string(info)) {
		if kib, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			n, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(kib), " kB"), 10, 64)
			free = n << 10
		}
	}
	if free < 512<<20 {
		d.find("memory", "only %s are available: a mount may use 0.7 GiB (retain= and readahead= make it less)", humanize.IBytes(free))
		return
	}
	d.say("memory", "%s are available", humanize.IBytes(free))
}

// mount looks at a mount without touching it.
func (d *doctor) mount(m mountEntry) {
	pid := serverOf(d.ctx, m)
	for try := 0; pid == 0 && try < 5; try++ { // it may have been mounted this moment
		time.Sleep(doctorLook / 5)
		pid = serverOf(d.ctx, m)
	}
	waiting := d.waiting(m)
	if pid == 0 {
		if m.Owner != os.Getuid() && os.Getuid() != 0 {
			d.say("mount", "%s was mounted by user %d: ask him, or root, to run this", filename.Quote(m.Mountpoint), m.Owner)
			return
		}
		d.find("mount", "%s is a mount of %s whose serving process has died: free it with umount -l %s, and mount it again. What programs had written and not made stable is lost. "+
			"The log %s may say why it died, and dmesg if there was no memory", filename.Quote(m.Mountpoint), filename.Quote(m.Source), filename.Quote(m.Mountpoint), filename.Quote(defaultLog(m.Mountpoint)))
		d.attachFile(defaultLog(m.Mountpoint))
		return
	}
	st, err := m.status(d.ctx)
	if err != nil {
		d.find("mount", "%s is served by process %d, which does not say how it is: %v. If that lasts, weft umount --force %s and mount it again", filename.Quote(m.Mountpoint), pid, err, filename.Quote(m.Mountpoint))
	} else {
		d.say("mount", "%s is a mount of %s, served by process %d, weft %s, since %s", filename.Quote(m.Mountpoint), filename.Quote(m.Source), pid, st.Version, humanize.Time(st.Since))
		d.service(&st)
		d.devices(&st)
	}
	if waiting > 0 {
		d.find("requests", "%d of programs have been waiting for a second and more. See above for what they may wait for; weft umount --force %s ends them with an error",
			waiting, filename.Quote(m.Mountpoint))
	}
	all, _ := json.MarshalIndent(st, "", "  ")
	d.attach("status of "+m.Mountpoint, all)
	var stacks string
	if err := m.askState(d.ctx, "stacks", &stacks); err != nil {
		stacks = err.Error()
	}
	d.attach("what process "+strconv.Itoa(pid)+" is doing", []byte(stacks))
	d.attachFile(fmt.Sprintf("/proc/%d/limits", pid))
	d.attachFile(fmt.Sprintf("/proc/%d/status", pid))
	if log, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/2", pid)); err == nil && filepath.IsAbs(log) && !strings.HasPrefix(log, "/dev/") {
		d.attachFile(log)
	}
}

// waiting is how many requests the kernel has had without an answer for a while.
func (d *doctor) waiting(m mountEntry) int {
	least := -1
	for range 5 {
		text, err := os.ReadFile(m.control("waiting"))
		if err != nil {
			return 0
		}
		n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
		if least < 0 || n < least {
			least = n
		}
		time.Sleep(doctorLook / 5)
	}
	return least
}

// service looks at the metadata services of a mount.
func (d *doctor) service(st *mountStatus) {
	if !st.Service.Connected || st.Service.Problem != "" {
		d.find("metadata", "%s: %s. Is the service running there, and does a firewall let its port through?", st.Service.Address, cmp.Or(st.Service.Problem, "not connected"))
	}
	if trouble := st.Service.Catalog.trouble(); trouble != "" {
		d.find("catalog", "%s. Make room on the disk of the metadata service, or remove files", trouble)
	}
	addresses := []string{st.Service.Address}
	for _, s := range st.Service.Services {
		addresses = append(addresses, s.Address)
	}
	slices.Sort(addresses)
	for _, addr := range slices.Compact(addresses) {
		d.dial("metadata", addr)
	}
}

// devices looks at the data servers of a mount.
func (d *doctor) devices(st *mountStatus) {
	if st.Retained > 128<<20 {
		d.find("written", "%s are not stable yet: data servers are slow to store them, or away", humanize.IBytes(uint64(st.Retained)))
	}
	for _, dev := range st.Devices {
		label := fmt.Sprintf("dev %.8s", dev.ID)
		switch {
		case dev.Address == "":
			d.say(label, "%s", dev.Problem)
		case !dev.Reachable:
			d.find(label, "%s: %s. Is the data server running, and does a firewall let its port through?", dev.Address, dev.Problem)
		case dev.Complaints > 0:
			d.find(label, "%s answers the metadata service, but not %d of the clients. Does a network between them and the data server drop packets?", dev.Address, dev.Complaints)
		case dev.Problem != "":
			d.find(label, "%s gets no new files: %s", dev.Address, dev.Problem)
		case dev.Total > 0 && dev.Free < dev.Total/20:
			d.find(label, "%s has only %s free of %s: remove files, or move some elsewhere (weft layout move), or add a data server", dev.Address,
				humanize.IBytes(uint64(dev.Free)), humanize.IBytes(uint64(dev.Total)))
		}
		if u := dev.Mount; u != nil && u.Trouble != "" {
			d.find(label, "%s: %s, since %s", dev.Address, u.Trouble, humanize.Time(u.Since))
		} else if u != nil && u.Error != "" && time.Since(u.ErrorAt) < time.Hour {
			d.say(label, "the last error was %s: %s", humanize.Time(u.ErrorAt), u.Error)
		}
		portals := dev.Portals
		if u, err := url.Parse(dev.Address); err == nil && u.Host != "" && len(portals) == 0 {
			portals = []string{u.Host}
		}
		for _, portal := range portals {
			d.dial(label, portal)
		}
		if dev.Reason != "" {
			d.say(label, "local: %s, because %s", map[bool]string{true: "only for reading", false: "no"}[dev.Local], dev.Reason)
		}
	}
}

// dial looks whether and how fast an address takes a connection.
func (d *doctor) dial(label, addr string) {
	began := time.Now()
	c, err := (&net.Dialer{Timeout: doctorDial}).DialContext(d.ctx, "tcp", addr)
	took := time.Since(began).Round(10 * time.Microsecond)
	if err != nil {
		d.find(label, "%v. Does something listen there (ss -tln), and does a firewall let it through?", err)
		return
	}
	defer c.Close()
	if took > doctorSlow {
		d.find(label, "%s took %v to take a connection: the network is slow, or loses packets", addr, took)
		return
	}
	d.say(label, "%s takes a connection within %v, by %s", addr, took, interfaceOf(c.LocalAddr()))
}

// interfaceOf names the interface that has an address, with its MTU.
func interfaceOf(addr net.Addr) string {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok {
		return addr.String()
	}
	list, _ := net.Interfaces()
	for _, i := range list {
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.Equal(tcp.IP) {
				return fmt.Sprintf("%s with an MTU of %d", i.Name, i.MTU)
			}
		}
	}
	return addr.String()
}

// allStacks are the stacks of all goroutines of this process.
func allStacks() string {
	buf := make([]byte, 1<<20)
	return string(buf[:runtime.Stack(buf, true)])
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/version"
	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/meta"
)

// singleState is what weftd single remembers in its directory, in single.json.
type singleState struct {
	// Where the data servers were last: tried again at the next start, so that clients that are still there find them.
	Host  string `json:"data_server_host"`
	Ports []int  `json:"data_server_ports"`

	Namespaces []singleNamespace `json:"namespaces,omitempty"`
}

const maxDataServers = 256

func runSingle(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe catalog is in DIR/catalog, data server N's files are in DIR/data/N, namespace N is the file DIR/nvme/N. The number of data\n" +
		"servers and of namespaces may grow from one start to the next, not shrink. Runs until SIGTERM or SIGINT, which let requests that\n" +
		"have begun end.\n")
	dir := fl.String("dir", "", "directory for everything, made if missing")
	count := fl.Int("data-servers", 4, fmt.Sprintf("how many data servers, 1 to %d; on a volume with namespaces there are none if this is not given", maxDataServers))
	spaces := fl.Int("nvme", 0, fmt.Sprintf("how many NVMe namespaces, up to %d, each at an NVMe/TCP port of its own, in place of data servers or beside them\n(default: as many as DIR has)", maxNamespaces))
	size := fl.String("nvme-size", "", "size of namespaces that are made, which take up what is written to them only (default: 64GiB, or less if the\nfile system has no room for that)")
	addr := fl.String("listen", "127.0.0.1:"+defaultPort, "address HOST:PORT of the metadata service")
	lease := fl.Duration("lease", meta.DefaultLease, "how long a client that is silent keeps what it holds")
	rate := rateFlag(fl)
	exports := exportFlag(fl)
	controllers := discoveryFlag(fl)
	ioMode := ioFlag(fl)
	local := localFlag(fl)
	secretFile := secretFlag(fl)
	secret := newTLSFlags(fl).accepting()
	watching := newWatchFlags(fl)
	if err := parse(c, fl, args, "dir"); err != nil {
		return err
	}
	if *spaces < 0 || *spaces > maxNamespaces {
		return usagef("single: --nvme %d: want 1 to %d", *spaces, maxNamespaces)
	}
	bytes, err := parseSize(*size, minNamespace)
	if err != nil {
		return usagef("single: --nvme-size: %v", err)
	}
	if *count < 0 || *count > maxDataServers {
		return usagef("single: --data-servers %d: want 1 to %d", *count, maxDataServers)
	}
	io, err := data.ParseIO(*ioMode)
	if err != nil {
		return usagef("single: --io: %v", err)
	}
	lend, err := data.ParseLocal(*local)
	if err != nil {
		return usagef("single: --localio: %v", err)
	}
	secrets, err := readSecrets(*secretFile)
	if err != nil {
		return err
	}
	log, err := watching.log(c)
	if err != nil {
		return err
	}
	lock, err := lockDir(*dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	state, _, err := readSingleState(*dir)
	if err != nil {
		return err
	}
	if !fl.Changed("nvme") {
		*spaces = len(state.Namespaces)
	}
	if !fl.Changed("data-servers") && *spaces > 0 {
		*count = len(state.Ports)
	}
	if *count == 0 && *spaces == 0 {
		return usagef("single: --data-servers 0: want 1 to %d, or namespaces in their place (--nvme)", maxDataServers)
	}
	door, err := secret.door(log)
	if err != nil {
		return err
	}
	if door.TLS != nil {
		secret.policy = string(rpctls.Mutual) // with its data servers
	}
	dial, err := secret.dialer()
	if err != nil {
		return err
	}
	l, err := listen(*addr, defaultPort)
	if err != nil {
		return err
	}
	servers := dataServers{io: io, local: lend, tls: door.TLS, required: door.Require}
	host := "127.0.0.1"
	if ip := l.Addr().(*net.TCPAddr).IP; !ip.IsUnspecified() {
		host = ip.String()
	}
	urls, err := servers.startSingle(*dir, *count, host, log)
	if err == nil {
		var more []string
		more, err = servers.namespaces.start(*dir, *spaces, bytes, host, log)
		urls = append(urls, more...)
	}
	if err != nil {
		l.Close()
		return errors.Join(err, servers.stop())
	}
	m, err := openMeta(ctx, *dir, datafile.Config{Dial: dial, Secrets: secrets, Log: log, Discovery: *controllers, DiscoveryFile: discoveryFile(*dir)},
		meta.Config{Lease: *lease, Resilver: int64(*rate), Exports: exports.rules, Door: door, Program: "weftd " + version.String()}, log)
	if err != nil {
		l.Close()
		return errors.Join(err, servers.stop())
	}
	servers.seen.catalog(m.engine)
	servers.seen.service(m.service, m.service)
	stop, err := servers.seen.serve(watching, log)
	if err != nil {
		l.Close()
		return errors.Join(err, m.close(), servers.stop())
	}
	defer stop()
	for _, url := range urls {
		if _, err := m.files.AddDevice(ctx, url, false); err != nil {
			l.Close()
			return errors.Join(err, m.close(), servers.stop())
		}
	}
	// The metadata service goes first: it still speaks to the data servers while it ends.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { // a data server that fails ends everything; ends with ctx
		select {
		case err := <-servers.failed:
			ended <- err
			cancel()
		case <-ctx.Done():
			ended <- nil
		}
	}()
	err = m.run(ctx, l)
	cancel()
	return errors.Join(err, <-ended, servers.stop())
}

// errRunning: there can be one on a directory.
var errRunning = errors.New("another weftd runs on this directory")

// lockDir makes sure that no other weftd runs on dir. The lock ends with the process.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "weftd.lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		owner := make([]byte, 32)
		n, _ := f.Read(owner)
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w: process %s", dir, errRunning, owner[:n])
		}
		return nil, err
	}
	f.Truncate(0)
	f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
	return f, nil
}

func singleFile(dir string) string { return filepath.Join(dir, "single.json") }

// readSingleState returns false if weftd single never ran on dir.
func readSingleState(dir string) (state singleState, found bool, err error) {
	name := singleFile(dir)
	b, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return state, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &state)
	}
	if err != nil {
		return state, false, fmt.Errorf("%s: %w", name, err)
	}
	return state, true, nil
}

func (s *singleState) write(dir string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	name := singleFile(dir)
	if old, err := os.ReadFile(name); err == nil && bytes.Equal(old, append(b, '\n')) {
		return nil // nothing is written, as the disk may be full
	}
	f, err := os.Create(name + ".new")
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	// Without it some file systems leave an empty file after a power failure.
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}

// startSingle starts the data servers of dir on the ports they had before, or free ones, and returns their URLs.
func (d *dataServers) startSingle(dir string, count int, host string, log *slog.Logger) ([]string, error) {
	state, _, err := readSingleState(dir)
	if err != nil {
		return nil, err
	}
	if count < len(state.Ports) {
		return nil, fmt.Errorf("%s has %d data servers, so --data-servers %d would leave files without their data", dir, len(state.Ports), count)
	}
	state.Ports = append(state.Ports, make([]int, count-len(state.Ports))...)
	urls := make([]string, count)
	for i := range urls {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(state.Ports[i])))
		if err != nil { // somebody has the port of before
			if l, err = net.Listen("tcp", net.JoinHostPort(host, "0")); err != nil {
				return nil, err
			}
		}
		state.Ports[i] = l.Addr().(*net.TCPAddr).Port
		urls[i] = "nfs://" + l.Addr().String() + "/"
		if err := d.start(singleDataDir(dir, i), l, log); err != nil {
			return nil, err
		}
	}
	state.Host = host
	return urls, state.write(dir)
}

// startAgain starts the data servers and namespaces that weftd single last ran on dir, where it last ran them; if it never ran
// there, nothing.
func (d *dataServers) startAgain(dir string, log *slog.Logger) error {
	state, found, err := readSingleState(dir)
	if err != nil || !found {
		return err
	}
	for i, port := range state.Ports {
		l, err := net.Listen("tcp", net.JoinHostPort(state.Host, strconv.Itoa(port)))
		if err != nil {
			return fmt.Errorf("start data server %d where it was: %w", i, err)
		}
		if err := d.start(singleDataDir(dir, i), l, log); err != nil {
			return err
		}
	}
	return d.namespaces.startAgain(dir, log)
}

func singleDataDir(dir string, i int) string { return filepath.Join(dir, "data", strconv.Itoa(i)) }

package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/server/nvme"
)

const (
	maxNamespaces = 256
	// defaultNamespace is how large a namespace is at most if nothing is said; files take up what is written to them only.
	defaultNamespace = 64 << 30
	// discoveryPort is that of NVMe/TCP discovery controllers.
	discoveryPort = "8009"
	// minNamespace has room for the label, its copy, and a few files, in bytes.
	minNamespace = 64 << 20
)

// discoveryFlag is the NVMe discovery controllers that the metadata service follows, host:port.
func discoveryFlag(fl *pflag.FlagSet) *discovery {
	d := new(discovery)
	fl.Var(d, "nvme-discovery", "NVMe discovery controller, HOST[:PORT] (port "+discoveryPort+" if not said), that the service stays connected to: it uses and leaves\naddresses of NVMe targets as that tells (may be repeated, for others that tell the same)")
	return d
}

type discovery []string

func (d *discovery) Set(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		host, port, err = net.SplitHostPort(net.JoinHostPort(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"), discoveryPort))
	}
	if n, e := strconv.ParseUint(port, 10, 16); err != nil || e != nil || n == 0 || host == "" || strings.ContainsAny(host, "[]/ ") {
		return fmt.Errorf("want HOST[:PORT], such as 10.1.0.9 or [fe80::1]:%s", discoveryPort)
	}
	*d = append(*d, net.JoinHostPort(host, port))
	return nil
}

func (d *discovery) Type() string { return "HOST[:PORT]" }

func (d *discovery) String() string { return strings.Join(*d, " ") }

// singleNamespace is what weftd single remembers of an NVMe namespace: by what it is known, and where it was last.
type singleNamespace struct {
	UUID string `json:"uuid"`
	Port int    `json:"port"`
}

// nqn is the name of the subsystem whose only namespace it is.
func (n *singleNamespace) nqn() string { return "nqn.2014-08.org.nvmexpress:uuid:" + n.UUID }

// id is the UUID in binary, which serves as NGUID, too.
func (n *singleNamespace) id() (id [16]byte, err error) {
	if len(n.UUID) == 36 {
		_, err = hex.Decode(id[:], []byte(n.UUID[:8]+n.UUID[9:13]+n.UUID[14:18]+n.UUID[19:23]+n.UUID[24:]))
	}
	if err != nil || len(n.UUID) != 36 || id == [16]byte{} {
		return id, fmt.Errorf("%q is not a UUID", n.UUID)
	}
	return id, nil
}

func newUUID() string {
	var id [16]byte
	rand.Read(id[:])
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // RFC 9562, version 4
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// namespaces are the NVMe namespaces that this process serves: each has a file, is alone in its subsystem, and has a controller port of its own.
type namespaces struct {
	target *nvme.Target // nil: there are none
	files  []*nvme.File
}

// start serves the first count namespaces of dir at the ports that they had before, or free ones, and returns their URLs. New ones are
// made with size bytes, or if that is 0 as large as the file system lets them be.
func (ns *namespaces) start(dir string, count int, size int64, host string, log *slog.Logger) ([]string, error) {
	state, _, err := readSingleState(dir)
	if err != nil {
		return nil, err
	}
	known := len(state.Namespaces)
	if count < known {
		return nil, fmt.Errorf("%s has %d namespaces, so --nvme %d would leave files without their data", dir, known, count)
	}
	if count == 0 {
		return nil, nil
	}
	if count > known {
		if err := makeNamespaces(dir, known, count, size); err != nil {
			return nil, err
		}
	}
	for range count - known {
		state.Namespaces = append(state.Namespaces, singleNamespace{UUID: newUUID()})
	}
	if err := ns.serve(dir, state.Namespaces, host, func(port int) int {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil { // somebody has the port of before
			return 0
		}
		l.Close()
		return port
	}, log); err != nil {
		return nil, err
	}
	urls := make([]string, count)
	for i := range urls {
		n := &state.Namespaces[i]
		addr := ns.target.Addr(uint16(i + 1))
		_, port, _ := net.SplitHostPort(addr)
		n.Port, _ = strconv.Atoi(port)
		urls[i] = "nvme://" + addr + "/" + n.nqn() + "#1"
		log.Info("NVMe namespace ready", "file", namespaceFile(dir, i), "url", urls[i])
	}
	state.Host = host
	return urls, state.write(dir)
}

// startAgain serves the namespaces that weftd single last served of dir where it last did; if it never did, nothing.
func (ns *namespaces) startAgain(dir string, log *slog.Logger) error {
	state, _, err := readSingleState(dir)
	if err != nil || len(state.Namespaces) == 0 {
		return err
	}
	return ns.serve(dir, state.Namespaces, state.Host, func(port int) int { return port }, log)
}

// serve starts the target. port says where to listen for one that was at a port before.
func (ns *namespaces) serve(dir string, list []singleNamespace, host string, port func(int) int, log *slog.Logger) error {
	cfg := nvme.Config{Log: log}
	for i := range list {
		n := &list[i]
		id, err := n.id()
		if err != nil {
			return fmt.Errorf("%s: namespace %d: %w", singleFile(dir), i, err)
		}
		f, err := nvme.OpenFile(namespaceFile(dir, i), false)
		if err != nil {
			return fmt.Errorf("namespace %d: %w", i, err)
		}
		ns.files = append(ns.files, f)
		cfg.Subsystems = append(cfg.Subsystems, nvme.Subsystem{
			NQN: n.nqn(), Serial: n.UUID[:8] + n.UUID[24:], AnyHost: true,
			Namespaces: []nvme.Namespace{{NSID: 1, Backing: f, BlockSize: 4096, NGUID: id, UUID: id}},
		})
		cfg.Ports = append(cfg.Ports, nvme.Port{
			ID: uint16(i + 1), Listen: net.JoinHostPort(host, strconv.Itoa(port(n.Port))), Subsystems: []string{n.nqn()},
			HeaderDigest: true, DataDigest: true,
		})
	}
	var err error
	ns.target, err = nvme.New(cfg)
	return err
}

// stop lets commands that have begun end.
func (ns *namespaces) stop(ctx context.Context) error {
	var err error
	if ns.target != nil {
		err = ns.target.Shutdown(ctx)
	}
	for _, f := range ns.files {
		err = errors.Join(err, f.Close())
	}
	*ns = namespaces{}
	return err
}

// makeNamespaces makes the files of namespaces from to to, sparse.
func makeNamespaces(dir string, from, to int, size int64) error {
	top := filepath.Join(dir, "nvme")
	if err := os.MkdirAll(top, 0o700); err != nil {
		return err
	}
	if size == 0 {
		var st unix.Statfs_t
		if err := unix.Statfs(top, &st); err != nil {
			return fmt.Errorf("%s: %w", top, err)
		}
		if size = namespaceSize(st.Bavail, st.Bsize, to-from); size < minNamespace {
			return fmt.Errorf("the file system of %s has %s free, which is not enough for %d namespaces: make room, or say how large they are with --nvme-size",
				dir, humanize.IBytes(st.Bavail*uint64(st.Bsize)), to-from)
		}
	}
	for i := from; i < to; i++ {
		f, err := os.OpenFile(namespaceFile(dir, i), os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Truncate(size), f.Sync(), f.Close()); err != nil {
			return fmt.Errorf("%w: choose another size with --nvme-size", err)
		}
	}
	d, err := os.Open(top)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// namespaceSize is how many bytes each of count namespaces gets where so many blocks are free.
func namespaceSize(blocks uint64, block int64, count int) int64 {
	most := blocks / uint64(count)
	if most > math.MaxInt64/uint64(block) {
		return defaultNamespace
	}
	return min(defaultNamespace, int64(most)*block&^(1<<20-1))
}

func namespaceFile(dir string, i int) string { return filepath.Join(dir, "nvme", strconv.Itoa(i)) }

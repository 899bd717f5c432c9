package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/internal/version"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// addrs are those of --server, or where the mounts of this machine get their metadata if they agree.
func (s *service) addrs() ([]string, error) {
	if s.hosts != "" {
		addrs, err := parseHosts(s.hosts)
		if err != nil {
			return nil, usagef("--server: %v", err)
		}
		return addrs, nil
	}
	mounts, err := weftMounts()
	if err != nil {
		return nil, err
	}
	var addrs []string
	for _, m := range mounts {
		s, err := parseSource(m.Source)
		if err != nil {
			return nil, err
		}
		if addrs != nil && fmt.Sprint(addrs) != fmt.Sprint(s.addrs) {
			return nil, usagef("several volumes are mounted here: choose one with --server HOST[:PORT]")
		}
		addrs = s.addrs
	}
	if addrs == nil {
		return nil, usagef("nothing is mounted here: name the metadata service with --server HOST[:PORT]")
	}
	return addrs, nil
}

func runDeviceAdd(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe data server or NVMe target must be running. Adding one that is known already changes nothing, except that a namespace is then used through\n" +
		"the address that was given, too. With nvme://HOST[:PORT], the address of a discovery controller (port " + discoveryPort + " if not said), all\n" +
		"namespaces are added that it leads this host to.\n")
	server := serviceFlag(fl)
	secretFile := fl.String("nvme-secretfile", "", "file with the secrets by which this host proves itself to the targets that a discovery controller leads to, as of the mount option")
	force := fl.Bool("force", false, "take a namespace though there is something on it, which is lost")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	discovery, err := discoveryAddr(fl.Arg(0))
	if err != nil {
		return usagef("admin device add: %v", err)
	}
	if *secretFile != "" && discovery == "" {
		return usagef("admin device add: --nvme-secretfile is for nvme://HOST[:PORT]: other URLs are for the service, which has a file of its own")
	}
	secrets, err := readSecrets(*secretFile)
	if err != nil {
		return fmt.Errorf("--nvme-secretfile: %w", err)
	}
	return withService(ctx, server, "admin device add", func(ctx context.Context, mc *metaclient.Volume) error {
		if discovery != "" {
			return addDiscovered(ctx, discovery, secrets, func(url string) (metarpc.DeviceInfo, error) { return mc.AddDevice(ctx, url, *force) }, os.Stdout)
		}
		info, err := mc.AddDevice(ctx, fl.Arg(0), *force)
		if err != nil {
			return err
		}
		printDevices(os.Stdout, []deviceStatus{deviceOf(info)}, "")
		return nil
	})
}

func runDeviceDrain(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe data files move in the background, while the files are read and written; ls shows how many are left. When there are\n" +
		"none the data server can be taken away with weft admin device remove. DEVICE is the beginning of its id, or its address.\n")
	server := serviceFlag(fl)
	cancel := fl.Bool("cancel", false, "use it again as before")
	wait := fl.Bool("wait", false, "return when there are no data files left; who interrupts that does not interrupt the moving")
	form := progress.Flag(fl)
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	if *wait && *cancel {
		return usagef("admin device drain: --wait --cancel: there is nothing to wait for")
	}
	return withSession(ctx, server, "admin device drain", func(ctx context.Context, mc *metaclient.Volume) error {
		asked, stop := context.WithTimeout(ctx, adminTimeout)
		defer stop()
		info, err := findDevice(asked, mc, fl.Arg(0))
		if err != nil {
			return err
		}
		if info, err = mc.DrainDevice(asked, info.Device.ID, *cancel); err != nil {
			return err
		}
		if *wait {
			id, all := info.Device.ID.String(), info.DataFiles
			err = await(ctx, *form, func(ctx context.Context) (progress.State, bool, error) {
				var err error
				info, err = findDevice(ctx, mc, id)
				all = max(all, info.DataFiles)
				st := progress.State{Counts: []progress.Count{{Unit: "data files", Done: all - info.DataFiles, Total: all}}}
				if !info.Reachable {
					st.Waits = info.URL + " (" + info.Problem + ")"
				}
				return st, info.DataFiles == 0, err
			})
			if err != nil {
				return err
			}
		}
		printDevices(os.Stdout, []deviceStatus{deviceOf(info)}, "")
		return nil
	})
}

// awaitLook is how often await looks.
const awaitLook = time.Second

// await shows how far something is that the services do, until it is over. look asks them, and says whether it is.
func await(ctx context.Context, form progress.Form, look func(context.Context) (progress.State, bool, error)) error {
	var last atomic.Pointer[progress.State]
	ask := func() (bool, error) {
		ctx, stop := context.WithTimeout(ctx, adminTimeout)
		defer stop()
		st, over, err := look(ctx)
		last.Store(&st)
		return over, err
	}
	over, err := ask()
	if err != nil || over {
		return err
	}
	shown := progress.Show(form, func() progress.State { return *last.Load() })
	defer shown.Stop()
	for {
		select {
		case <-time.After(awaitLook):
		case <-ctx.Done():
			return errors.New("interrupted; the services go on")
		}
		if over, err := ask(); over || err != nil && ctx.Err() == nil {
			return err
		}
	}
}

func runResilver(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe metadata services make copies anew by themselves; who interrupts this does not interrupt them.\n")
	server := serviceFlag(fl)
	form := progress.Flag(fl)
	if err := parse(c, fl, args, 0, 0); err != nil {
		return err
	}
	return withSession(ctx, server, "admin resilver", func(ctx context.Context, mc *metaclient.Volume) error {
		all, before := int64(0), int64(-1)
		return await(ctx, *form, func(ctx context.Context) (progress.State, bool, error) {
			st, err := mc.WholeStatus(ctx)
			if err != nil {
				return progress.State{}, false, err
			}
			all = max(all, st.Stale)
			if before < 0 {
				before = st.Copied
			}
			waits, err := awaitedServers(ctx, mc, st)
			return progress.State{Counts: []progress.Count{
				{Unit: "files", Done: all - st.Stale, Total: all}, {Unit: progress.Bytes, Done: max(0, st.Copied-before)},
			}, Waits: waits}, st.Stale == 0, err
		})
	})
}

// awaitedServers says for people which data servers files wait for, and how many.
func awaitedServers(ctx context.Context, mc *metaclient.Volume, st *metarpc.StatusResult) (string, error) {
	if st.Stale == 0 || len(st.Waiting) == 0 {
		return "", nil
	}
	infos, err := mc.Devices(ctx)
	if err != nil {
		return "", err
	}
	waiting := waitingFiles(st)
	var parts []string
	for _, info := range infos {
		if n := waiting[info.Device.ID]; n > 0 {
			parts = append(parts, fmt.Sprintf("%s (%s; %d files)", info.URL, cmp.Or(info.Problem, "ok"), n))
		}
	}
	if n := waiting[layout.DeviceID{}]; n > 0 {
		parts = append(parts, fmt.Sprintf("one more data server (%d files)", n))
	}
	return strings.Join(parts, ", "), nil
}

func runDeviceRemove(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nIt must have been drained, and ls must show no data files there any more. What is left there is the directory of the volume, without data files;\n" +
		"the data server can be added again. DEVICE is the beginning of its id, or its address.\n")
	server := serviceFlag(fl)
	lost := fl.Bool("lost", false, "it is gone for good: do not remove what nobody needs there")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	return withService(ctx, server, "admin device remove", func(ctx context.Context, mc *metaclient.Volume) error {
		info, err := findDevice(ctx, mc, fl.Arg(0))
		if err != nil {
			return err
		}
		if err := mc.RemoveDevice(ctx, info.Device.ID, *lost); err != nil {
			return err
		}
		fmt.Printf("device %v at %s is no longer part of the volume\n", info.Device.ID, info.URL)
		return nil
	})
}

// findDevice looks a device up by its address or the beginning of its id.
func findDevice(ctx context.Context, mc *metaclient.Volume, name string) (metarpc.DeviceInfo, error) {
	infos, err := mc.Devices(ctx)
	if err != nil {
		return metarpc.DeviceInfo{}, err
	}
	var found []metarpc.DeviceInfo
	for _, info := range infos {
		if info.URL == name || name != "" && strings.HasPrefix(info.Device.ID.String(), name) {
			found = append(found, info)
		}
	}
	if len(found) != 1 {
		return metarpc.DeviceInfo{}, usagef("%q is %d of the volume's %d data servers; see weft admin device ls", name, len(found), len(infos))
	}
	return found[0], nil
}

func runDeviceList(ctx context.Context, c *command, args []string) error {
	return printAnswer(ctx, c, args, "print an array of objects", (*metaclient.Volume).Devices, func(infos []metarpc.DeviceInfo, asJSON bool) error {
		list := []deviceStatus{}
		for _, info := range infos {
			list = append(list, deviceOf(info))
		}
		return printList(list, asJSON, "no data servers yet; add one with: weft admin device add nfs://HOST:PORT/EXPORT, or nvme://HOST:PORT/NQN#NSID",
			func(out io.Writer) { printDevices(out, list, "") })
	})
}

func deviceOf(info metarpc.DeviceInfo) deviceStatus {
	st := deviceStatus{
		ID:        info.Device.ID.String(),
		Address:   info.URL,
		Reachable: info.Reachable,
		Problem:   info.Problem,
		Total:     info.Total,
		Free:      info.Free,
		DataFiles: info.DataFiles,
		Draining:  info.Draining,
		Load:      float64(info.Load) / 1000,

		Complaints: info.Complaints,
		Caches:     info.Caches, CacheBytes: info.CacheBytes,
		Fencing: info.Fencing,
	}
	if len(info.Device.Namespace) > 0 {
		st.Portals = info.Device.Addrs
	}
	return st
}

// quietLog is for commands, who tell what fails by themselves.
func quietLog() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}

// withService runs do with a session of its own, for a minute at most.
func withService(ctx context.Context, server *service, doing string, do func(context.Context, *metaclient.Volume) error) error {
	return withSession(ctx, server, doing, func(ctx context.Context, mc *metaclient.Volume) error {
		ctx, cancel := context.WithTimeout(ctx, adminTimeout)
		defer cancel()
		return do(ctx, mc)
	})
}

// withSession runs do, for as long as it takes.
func withSession(ctx context.Context, server *service, doing string, do func(context.Context, *metaclient.Volume) error) error {
	addrs, err := server.addrs()
	if err != nil {
		return err
	}
	secret, _, err := server.clients()
	if err != nil {
		return usagef("%s: --xprtsec: %v", doing, err)
	}
	dialling, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	mc, err := metaclient.Dial(dialling, metaclient.Config{Addrs: addrs, TLS: secret, Client: clientInfo(doing), Log: quietLog()})
	if err != nil {
		return err
	}
	err = do(ctx, mc)
	closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return errors.Join(err, mc.Close(closing))
}

// adminTimeout bounds one administrative command.
const adminTimeout = 60 * time.Second

// clientInfo tells the service who we are.
func clientInfo(mount string) metarpc.ClientInfo {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	info := metarpc.ClientInfo{Host: host, PID: os.Getpid(), Program: "weft " + version.String(), Mount: mount}
	rand.Read(info.ID[:])
	return info
}

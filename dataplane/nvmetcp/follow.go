package nvmetcp

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Follow has discovery controllers tell at which addresses subsystems are used, as Use says, until the Initiator is closed. addrs are those of
// DiscoveryConfig. Whether they answer is not waited for: see Discovery. What they tell is kept in file, whose directory is made, and the
// next start uses that at once; if file is "" it is not kept. Follow is called once.
func (i *Initiator) Follow(addrs []string, file string) error {
	known, err := readDirectory(file)
	if err != nil {
		i.cfg.Log.Warn("what NVMe discovery told before is not used", "error", err)
	}
	controller := i.controller("")
	controller.KATO = 0 // its own: it is not that of an I/O controller, which must be short
	d, err := Follow(context.Background(), DiscoveryConfig{
		Controller: controller, Addrs: addrs, Known: known,
		OnChange: func(dir *Directory) {
			i.Use(dir)
			if dir == known || file == "" {
				return
			}
			if err := writeDirectory(file, dir); err != nil {
				i.cfg.Log.Warn("what NVMe discovery tells is not kept for the next start", "error", err)
			}
		},
	})
	if err != nil {
		return err
	}
	i.mu.Lock()
	closed := i.closed
	i.discovery = d
	i.mu.Unlock()
	if closed {
		d.Close()
		return ErrClosed
	}
	return nil
}

// readDirectory reads what writeDirectory wrote; without a file or if it fails it returns an empty Directory.
func readDirectory(file string) (*Directory, error) {
	b, err := os.ReadFile(file)
	if file == "" || errors.Is(err, fs.ErrNotExist) {
		return new(Directory), nil
	}
	var d *Directory
	if err == nil {
		d, err = DecodeDirectory(b)
	}
	if err != nil {
		return new(Directory), err
	}
	return d, nil
}

// writeDirectory replaces file, which several processes may do at once. One that a power failure has damaged is not believed, so nothing is synced.
func writeDirectory(file string, d *Directory) error {
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, filepath.Base(file)+".*.new")
	if err != nil {
		return err
	}
	_, err = f.Write(d.Encode())
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// Use gives subsystems the addresses that dir has of them, those in use at once and others when they are opened, and takes away those that an
// earlier Directory had and dir has not. Addresses of which no Directory ever told stay. A subsystem of which dir has none keeps what it has.
func (i *Initiator) Use(dir *Directory) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, p := range i.dir.Portals {
		i.withdrawn[Portal{NQN: p.NQN, Addr: p.Addr}] = struct{}{}
	}
	for _, p := range dir.Portals {
		delete(i.withdrawn, Portal{NQN: p.NQN, Addr: p.Addr})
	}
	i.dir = dir
	for nqn, o := range i.subsystems {
		o.s.SetAddrs(i.followed(nqn, o.s.Addrs()))
	}
}

// followed is addrs, at which a subsystem is or was to be used, after what Use was told. mu is held.
func (i *Initiator) followed(nqn string, addrs []string) []string {
	told := i.dir.Addrs(nqn)
	if len(told) == 0 {
		return addrs
	}
	for _, addr := range addrs {
		if _, gone := i.withdrawn[Portal{NQN: nqn, Addr: addr}]; !gone && !slices.Contains(told, addr) {
			told = append(told, addr)
		}
	}
	return told
}

// Discovery is what is known of the connections to the discovery controllers that are followed, as [Discovery.Stats] has it; nil if none are.
func (i *Initiator) Discovery() []DiscoveryStats {
	i.mu.Lock()
	d := i.discovery
	i.mu.Unlock()
	if d == nil {
		return nil
	}
	return d.Stats()
}

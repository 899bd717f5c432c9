package meta

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/schema"
)

func (s *Service) describeLayout(ctx context.Context, _ *call, a *metarpc.IDArgs) (*metarpc.Described, error) {
	ino, _, err := s.regular(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	var row schema.Layout
	if _, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(a.ID), &row); err != nil {
		return nil, err
	}
	d := s.cfg.Files.Describe(row, ino)
	return &d, nil
}

// learnTime is how long the engine may take to say what devices there are, before the answer is what the service knows.
const learnTime = 2 * time.Second

func (s *Service) devices(ctx context.Context, _ *call, _ *metarpc.Empty) (*metarpc.DevicesResult, error) {
	// The client may have a layout of another service, which names a device that was added a moment ago. While the engine does not answer, nothing is added.
	learning, cancel := context.WithTimeout(ctx, learnTime)
	defer cancel()
	if err := s.cfg.Files.LearnDevices(learning); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return nil, err
	}
	r := &metarpc.DevicesResult{Devices: s.cfg.Files.Devices(learning)}
	for i := range r.Devices {
		r.Devices[i].Caches, r.Devices[i].CacheBytes, _ = s.caches.usage(r.Devices[i].Device.ID)
	}
	return r, nil
}

func (s *Service) addDevice(ctx context.Context, c *call, a *metarpc.AddDeviceArgs) (*metarpc.AddDeviceResult, error) {
	if err := s.admin(c); err != nil {
		return nil, err
	}
	info, err := s.cfg.Files.AddDevice(ctx, a.URL, a.Force)
	if err != nil {
		if c.sess.ctx.Err() != nil {
			return nil, err
		}
		s.log.Warn("data server not added", "url", a.URL, "session", c.sess, "error", err)
		errno := syscall.EIO
		errors.As(err, &errno)
		return nil, refusef(metarpc.Status(errno), "%v", err)
	}
	return &metarpc.AddDeviceResult{Info: info}, nil
}

func (s *Service) drainDevice(ctx context.Context, c *call, a *metarpc.DrainDeviceArgs) (*metarpc.AddDeviceResult, error) {
	if err := s.admin(c); err != nil {
		return nil, err
	}
	info, err := s.cfg.Files.DrainDevice(ctx, a.Device, a.Cancel)
	if err != nil {
		return nil, err
	}
	s.resilverSoon()
	return &metarpc.AddDeviceResult{Info: info}, nil
}

func (s *Service) removeDevice(ctx context.Context, c *call, a *metarpc.RemoveDeviceArgs) (*metarpc.Empty, error) {
	if err := s.admin(c); err != nil {
		return nil, err
	}
	if err := s.cfg.Files.RemoveDevice(ctx, a.Device, a.Lost); err != nil {
		if c.sess.ctx.Err() != nil {
			return nil, err
		}
		s.log.Warn("data server not removed", "device", a.Device, "session", c.sess, "error", err)
		errno := syscall.EIO
		errors.As(err, &errno)
		return nil, refusef(metarpc.Status(errno), "%v", err)
	}
	return &metarpc.Empty{}, nil
}

// errNoMembers answers questions about the other services of a volume that has none.
var errNoMembers = refusef(metarpc.Status(syscall.EOPNOTSUPP), "the volume has one metadata service, whose catalog others cannot share")

func (s *Service) metaList(ctx context.Context, _ *call, _ *metarpc.Empty) (*metarpc.MetaListResult, error) {
	if s.cfg.Members == nil {
		return nil, errNoMembers
	}
	return s.cfg.Members.List(ctx)
}

func (s *Service) metaDrain(ctx context.Context, c *call, a *metarpc.MetaDrainArgs) (*metarpc.MetaListResult, error) {
	if err := s.admin(c); err != nil {
		return nil, err
	}
	if s.cfg.Members == nil {
		return nil, errNoMembers
	}
	err := s.cfg.Members.Drain(ctx, a.Address, a.Cancel)
	if errno := syscall.Errno(0); errors.As(err, &errno) && (errno == syscall.ENOENT || errno == syscall.EBUSY) {
		return nil, refusef(metarpc.Status(errno), "%v", err)
	}
	if err != nil {
		return nil, err
	}
	return s.cfg.Members.List(ctx)
}

func (s *Service) layoutStats(_ context.Context, c *call, a *metarpc.LayoutStatsArgs) (*metarpc.Empty, error) {
	s.cfg.Files.Report(c.sess.id, time.Duration(a.Span), a.Devices)
	return &metarpc.Empty{}, nil
}

func (s *Service) statFS(ctx context.Context, _ *call, a *metarpc.IDArgs) (*metarpc.StatFSResult, error) {
	r := new(metarpc.StatFSResult)
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixFiles, 1, 1+2) {
		if err != nil {
			return nil, err
		}
		counters, err := schema.DecodeCounters(kv.Key, kv.Value)
		if err != nil {
			return nil, err
		}
		r.Files += counters.Field(0)
	}
	r.Files = max(r.Files, 0)
	r.Total, r.Free, r.Avail = s.cfg.Files.StatFS()
	return r, s.limitSpace(ctx, a.ID, r)
}

func (s *Service) statusOf(ctx context.Context, c *call, _ *metarpc.Empty) (*metarpc.StatusResult, error) {
	room := s.engine.Room()
	r := &metarpc.StatusResult{
		Program: s.cfg.Program,
		Started: s.started.UnixNano(),
		Garbage: s.cfg.Files.GarbageCount(ctx),
		Stale:   s.staleFiles(ctx),
		Copied:  s.resilver.copied.Load(),
		Waiting: s.waiting(),
		Catalog: metarpc.CatalogRoom{Free: room.Free, Size: room.Size, Reserve: room.Reserve, Low: room.Low, Full: room.Full},
	}
	confined := c.sess.confinement() != nil
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Grace = s.grace
	r.HeldUp = s.allHeldUp()
	for _, sess := range s.sessions {
		if confined && sess != c.sess {
			continue // others are not its business
		}
		info := metarpc.SessionInfo{Client: sess.client, Renewed: time.Now().Add(-sess.idle()).UnixNano(), Calls: sess.calls.Load()}
		for _, cl := range sess.claims {
			if cl.open {
				info.Opens++
			}
			if cl.writer {
				info.Layouts++
			}
		}
		sess.mu.Lock()
		if sess.conn != nil {
			info.Address = sess.address
		}
		sess.mu.Unlock()
		r.Sessions = append(r.Sessions, info)
	}
	slices.SortFunc(r.Sessions, func(a, b metarpc.SessionInfo) int {
		return cmp.Or(cmp.Compare(a.Client.Host, b.Client.Host), cmp.Compare(a.Client.Mount, b.Client.Mount),
			slices.Compare(a.Client.ID[:], b.Client.ID[:]))
	})
	return r, nil
}

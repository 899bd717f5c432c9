package meta

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/meta/schema"
)

func (s *Service) describeLayout(ctx context.Context, c *call, a *metarpc.IDArgs) (*metarpc.Described, error) {
	if err := s.settleSize(ctx, c.sess, a.ID); err != nil {
		return nil, err
	}
	attr, err := s.attributes(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	ino, _, err := s.regular(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	var row schema.Layout
	if _, err := s.get(ctx, schema.LayoutKey(a.ID), &row); err != nil {
		return nil, err
	}
	d := s.cfg.Files.Describe(row, ino)
	d.Size = attr.Size // with what is reported and not yet in the inode row
	return &d, nil
}

func (s *Service) devices(ctx context.Context, _ *call, _ *metarpc.Empty) (*metarpc.DevicesResult, error) {
	r := &metarpc.DevicesResult{Devices: s.cfg.Files.Devices(ctx)}
	for i := range r.Devices {
		r.Devices[i].Caches, r.Devices[i].CacheBytes, _ = s.caches.usage(r.Devices[i].Device.ID)
	}
	return r, nil
}

func (s *Service) addDevice(ctx context.Context, c *call, a *metarpc.AddDeviceArgs) (*metarpc.AddDeviceResult, error) {
	switch who := s.caller(c); {
	case !who.privileged:
		return nil, errPerm
	case who.readOnly:
		return nil, errReadOnly
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
	switch who := s.caller(c); {
	case !who.privileged:
		return nil, errPerm
	case who.readOnly:
		return nil, errReadOnly
	}
	info, err := s.cfg.Files.DrainDevice(ctx, a.Device, a.Cancel)
	if err != nil {
		return nil, err
	}
	s.resilverSoon()
	return &metarpc.AddDeviceResult{Info: info}, nil
}

func (s *Service) removeDevice(ctx context.Context, c *call, a *metarpc.RemoveDeviceArgs) (*metarpc.Empty, error) {
	switch who := s.caller(c); {
	case !who.privileged:
		return nil, errPerm
	case who.readOnly:
		return nil, errReadOnly
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

func (s *Service) layoutStats(_ context.Context, c *call, a *metarpc.LayoutStatsArgs) (*metarpc.Empty, error) {
	s.cfg.Files.Report(c.sess.id, time.Duration(a.Span), a.Devices)
	return &metarpc.Empty{}, nil
}

func (s *Service) statFS(ctx context.Context, _ *call, _ *metarpc.Empty) (*metarpc.StatFSResult, error) {
	raw, err := s.engine.Get(ctx, schema.KeyUsage)
	if err != nil {
		return nil, err
	}
	usage, err := decodeCounters(schema.KeyUsage, raw)
	if err != nil {
		return nil, err
	}
	r := &metarpc.StatFSResult{Files: max(usage.Field(0), 0)}
	r.Total, r.Free, r.Avail = s.cfg.Files.StatFS()
	return r, nil
}

func (s *Service) statusOf(ctx context.Context, _ *call, _ *metarpc.Empty) (*metarpc.StatusResult, error) {
	r := &metarpc.StatusResult{
		Program: s.cfg.Program,
		Started: s.started.UnixNano(),
		Garbage: s.cfg.Files.GarbageCount(ctx),
		Stale:   s.staleFiles(ctx),
		Copied:  s.resilver.copied.Load(),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Grace = s.grace
	r.HeldUp = s.allHeldUp()
	for _, sess := range s.sessions {
		info := metarpc.SessionInfo{Client: sess.client, Renewed: time.Now().Add(-sess.idle()).UnixNano()}
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

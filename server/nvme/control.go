package nvme

import (
	"fmt"
	"slices"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

func (t control) PortUp(id uint16) error { return t.portUp(id) }

func (t control) PortDown(id uint16) error {
	t.mu.Lock()
	p := t.ports[id]
	if p == nil {
		t.mu.Unlock()
		return fmt.Errorf("NVMe target: there is no port %d", id)
	}
	if p.listener != nil {
		p.listener.Close()
		p.listener = nil
	}
	ended := t.cut(func(c *conn) bool { return c.port == p }) // first: nobody is told that the controller is not ready
	for _, s := range t.subsystems {
		for _, ctrl := range s.controllers {
			if ctrl.port == p {
				t.remove(ctrl)
			}
		}
	}
	t.discoveryChanged()
	t.mu.Unlock()
	await(ended)
	return nil
}

func (t control) SetANA(portID uint16, group uint32, state wire.ANAState) error {
	if err := checkANA(group, state); err != nil {
		return fmt.Errorf("NVMe target: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.ports[portID]
	if p == nil {
		return fmt.Errorf("NVMe target: there is no port %d", portID)
	}
	table := *p.ana.Load()
	if table.states[group] == state {
		return nil
	}
	table.change++
	table.states[group], table.changes[group] = state, table.change
	p.ana.Store(&table)
	for _, s := range t.subsystems {
		for _, ctrl := range s.controllers {
			if ctrl.port == p && !s.discovery {
				ctrl.raise(eventANA)
			}
		}
	}
	return nil
}

func (t control) AddNamespace(nqn string, cfg Namespace) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.find(nqn)
	if err != nil {
		return err
	}
	if err = cfg.validate(); err == nil {
		err = t.add(s, cfg)
	}
	if err != nil {
		return fmt.Errorf("NVMe target: subsystem %q: %w", nqn, err)
	}
	s.changed(cfg.NSID)
	return nil
}

func (t control) RemoveNamespace(nqn string, nsid uint32) error {
	t.mu.Lock()
	s, err := t.find(nqn)
	var n *namespace
	if err == nil {
		if n = s.table.Load().get(nsid); n == nil {
			err = fmt.Errorf("NVMe target: subsystem %q: there is no namespace %d", nqn, nsid)
		}
	}
	if err != nil {
		t.mu.Unlock()
		return err
	}
	list := slices.Clone(s.table.Load().list)
	list[nsid] = nil
	s.table.Store(newTable(list))
	s.changed(nsid)
	t.mu.Unlock()
	n.mu.Lock()
	n.gone = true
	n.mu.Unlock()
	n.refs.Wait()
	return nil
}

func (t control) Resize(nqn string, nsid uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.find(nqn)
	if err != nil {
		return err
	}
	n := s.table.Load().get(nsid)
	if n == nil {
		return fmt.Errorf("NVMe target: subsystem %q: there is no namespace %d", nqn, nsid)
	}
	changed, err := n.measure()
	if err != nil {
		return fmt.Errorf("NVMe target: subsystem %q: %w", nqn, err)
	}
	if changed {
		s.changed(nsid)
	}
	return nil
}

func (t control) AllowHost(nqn string, h Host) error {
	if err := h.validate(nqn); err != nil {
		return fmt.Errorf("NVMe target: subsystem %q: %w", nqn, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.find(nqn)
	if err != nil {
		return err
	}
	s.hosts[h.NQN] = h
	t.discoveryChanged()
	return nil
}

func (t control) DisallowHost(nqn, host string) error {
	t.mu.Lock()
	s, err := t.find(nqn)
	if err != nil {
		t.mu.Unlock()
		return err
	}
	s.AnyHost = false
	delete(s.hosts, host)
	ended := t.drop(s, func(ctrl *controller) bool { return ctrl.hostNQN == host })
	t.discoveryChanged()
	t.mu.Unlock()
	await(ended)
	return nil
}

func (t control) DropControllers(nqn, host string) error {
	t.mu.Lock()
	s, err := t.find(nqn)
	if err != nil {
		t.mu.Unlock()
		return err
	}
	ended := t.drop(s, func(ctrl *controller) bool { return host == "" || ctrl.hostNQN == host })
	t.mu.Unlock()
	await(ended)
	return nil
}

// find returns a subsystem that is no discovery service. t.mu is held.
func (t *Target) find(nqn string) (*subsystem, error) {
	if s := t.subsystems[nqn]; s != nil && !s.discovery {
		return s, nil
	}
	return nil, fmt.Errorf("NVMe target: there is no subsystem %q", nqn)
}

// changed tells hosts that a namespace came, went, or has another size. Target.mu is held.
func (s *subsystem) changed(nsid uint32) {
	for _, ctrl := range s.controllers {
		ctrl.namespaceChanged(nsid)
	}
}

// drop ends controllers, and returns the connections that have to end, those of controllers that ended before among them.
// t.mu is held.
func (t *Target) drop(s *subsystem, which func(*controller) bool) (ended []*conn) {
	ended = t.cut(func(c *conn) bool {
		ctrl := c.ctrl.Load()
		return ctrl != nil && ctrl.sub == s && which(ctrl)
	})
	for _, ctrl := range s.controllers {
		if which(ctrl) {
			t.remove(ctrl)
		}
	}
	return ended
}

// await waits until no command of connections that were cut runs.
func await(ended []*conn) {
	for _, c := range ended {
		<-c.done
	}
}

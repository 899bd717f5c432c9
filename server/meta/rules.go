package meta

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/schema"
)

// Rules say what clients may do. Those of the volume, which are a row of the catalog and are set by weft admin client, come before those that the
// service was started with; of them the most specific one counts. The row is read when a client connects, and every rulesPeriod for those that are
// connected: who has no rule any more loses the session. A rule with a Path confines a session to what is below that directory. Of what is above
// it only the way to it can be looked up, and nothing be read; an inode counts as being where its home is, which of a file with several names is
// one of them. A file that has no name any more is for whoever its mode lets open it.

const (
	// rulesPeriod is how soon a change of the rules is noticed that another service has made.
	rulesPeriod = 5 * time.Second
	// maxRuleBytes is how long all rules of a volume can be.
	maxRuleBytes = 256 << 10
)

// maxSessions is how many sessions one client can have at a service: each mount needs one, and each command that asks the service. Tests have fewer.
var maxSessions = 4096

// rules are those of the volume.
type rules struct {
	mu     sync.Mutex
	row    []byte      // what list was made of
	list   admit.Rules // the most specific first
	moves  []byte      // the row that counts when directories changed their parents
	meters admit.Meters
}

// grant is what a rule gives a session.
type grant struct {
	admit.Export
	top   layout.FileID   // the directory of Path; 0: all of the volume
	above []layout.FileID // the directories on the way to it, the root last
}

// admitted finds what holds for a client. An error says why it is not to be let in.
func (s *Service) admitted(ctx context.Context, in *admit.Incoming) (grant, error) {
	if err := s.cfg.Door.Refuses(in); err != nil {
		return grant{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, learnTime)
	defer cancel()
	if err := s.readRules(ctx); err != nil {
		s.log.Error("the rules for clients cannot be read; those that are known count", "error", err)
	}
	return s.granted(ctx, in.Conn.RemoteAddr().String(), in.Peer.Name)
}

// granted is what the rules give a client of an address "IP:port" whose certificate says name.
func (s *Service) granted(ctx context.Context, address, name string) (grant, error) {
	s.rules.mu.Lock()
	list := s.rules.list
	s.rules.mu.Unlock()
	e, ok := append(list[:len(list):len(list)], s.cfg.Exports...).For(address, name)
	switch {
	case !ok && name != "":
		return grant{}, fmt.Errorf("the volume is not exported to %s, nor to certificates of %q", address, name)
	case !ok:
		return grant{}, fmt.Errorf("the volume is not exported to %s", address)
	}
	g := grant{Export: e}
	return g, s.confine(ctx, &g)
}

// pathError says that a rule names a directory which is not there.
type pathError struct {
	rule admit.Export
	why  string
}

func (e *pathError) Error() string {
	return fmt.Sprintf("the rule for %s says path=%s, and %s: make that directory, or name another one (weft admin client set, or --export of the service)",
		e.rule.Whose(), e.rule.Path, e.why)
}

// confine finds the directory of g.Path.
func (s *Service) confine(ctx context.Context, g *grant) error {
	dir, at := layout.RootID, "/"
	var way []layout.FileID
	for _, name := range strings.FieldsFunc(g.Path, func(r rune) bool { return r == '/' }) {
		way = append(way, dir)
		var entry schema.Entry
		raw, err := schema.ReadRow(ctx, s.engine, schema.EntryKey(dir, name), &entry)
		if err == nil && raw == nil {
			err = errNoEntry
		}
		var row schema.Inode
		if err == nil {
			row, _, err = s.inode(ctx, entry.ID)
		}
		at = path.Join(at, name)
		switch missing := (*metarpc.Error)(nil); {
		case errors.As(err, &missing):
			return &pathError{g.Export, fmt.Sprintf("the volume has no directory %s", at)}
		case err != nil:
			return fmt.Errorf("the rule for %s: path=%s: %w", g.Whose(), g.Path, err)
		case !isDir(row.Mode):
			return &pathError{g.Export, fmt.Sprintf("%s of the volume is not a directory", at)}
		}
		dir = entry.ID
	}
	if len(way) > 0 {
		slices.Reverse(way)
		g.top, g.above = dir, way
	}
	return nil
}

// readRules takes note of what the catalog has.
func (s *Service) readRules(ctx context.Context) error {
	raw, err := s.engine.GetMany(ctx, [][]byte{schema.KeyClients, schema.KeyMoves})
	if err != nil {
		return err
	}
	s.rules.mu.Lock()
	defer s.rules.mu.Unlock()
	if !bytes.Equal(s.rules.moves, raw[1]) {
		s.rules.moves = raw[1]
		s.usage.ForgetParents() // another service may have moved them
	}
	if bytes.Equal(s.rules.row, raw[0]) {
		return nil
	}
	list, err := parseRules(raw[0])
	if err != nil {
		return err
	}
	s.rules.row, s.rules.list = raw[0], list
	return nil
}

// parseRules reads the row; nil: there is none.
func parseRules(raw []byte) (admit.Rules, error) {
	if raw == nil {
		return nil, nil
	}
	var row schema.Clients
	if err := schema.DecodeRow(schema.KeyClients, raw, &row); err != nil {
		return nil, err
	}
	list := make(admit.Rules, len(row.Rules))
	for i, rule := range row.Rules {
		var err error
		if list[i], err = admit.Parse(rule); err != nil {
			return nil, fmt.Errorf("a rule for clients in the catalog, of a later version maybe: %w", err)
		}
	}
	return list, nil
}

// watchRules tells sessions of rules that have changed. It ends with s.ctx.
func (s *Service) watchRules() {
	for retry.Pause(s.ctx, rulesPeriod) == nil {
		if err := s.readRules(s.ctx); err != nil {
			if s.ctx.Err() == nil {
				s.log.Error("the rules for clients cannot be read", "error", err)
			}
			continue
		}
		s.applyRules()
	}
}

// applyRules gives each session that is connected what the rules give it now.
func (s *Service) applyRules() {
	s.mu.Lock()
	sessions := make([]*session, 0, len(s.sessions))
	for _, sess := range s.sessions {
		sessions = append(sessions, sess)
	}
	s.mu.Unlock()
	s.rules.meters.Tidy()
	for _, sess := range sessions {
		sess.mu.Lock()
		address, name, connected := sess.address, sess.peer.Name, sess.conn != nil
		sess.mu.Unlock()
		if !connected {
			continue // it is looked at when it comes back
		}
		switch g, err := s.granted(s.ctx, address, name); {
		case err == nil:
			sess.mu.Lock()
			sess.grant = g
			sess.mu.Unlock()
		case s.ctx.Err() != nil:
			return
		case errors.As(err, new(*pathError)) || g.Path == "":
			s.end(sess, err.Error())
		default: // the engine did not answer
			s.log.Error("the rules for clients cannot be applied", "session", sess, "error", err)
		}
	}
}

// confinement is what confines a session, nil if nothing does.
func (sess *session) confinement() *grant {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if sess.grant.top == 0 {
		return nil
	}
	g := sess.grant
	return &g
}

// within refuses a call of a session that is confined, if it is about something else.
func (s *Service) within(ctx context.Context, g *grant, op metarpc.Op, args any) error {
	switch a := args.(type) {
	case *metarpc.CloseArgs, *metarpc.LayoutReturnArgs, *metarpc.LeaseReturnArgs:
		return nil // what the session has
	case *metarpc.NameArgs:
		if i := slices.Index(g.above, a.Parent); i >= 0 {
			next := g.top
			if i > 0 {
				next = g.above[i-1]
			}
			var entry schema.Entry
			raw, err := schema.ReadRow(ctx, s.engine, schema.EntryKey(a.Parent, a.Name), &entry)
			if err == nil && (raw == nil || entry.ID != next) {
				err = errAccess
			}
			return err
		}
	case *metarpc.LinkArgs:
		if err := s.below(ctx, g.top, a.Parent); err != nil {
			return err
		}
	case *metarpc.RenameArgs:
		if err := s.below(ctx, g.top, a.NewParent); err != nil {
			return err
		}
	}
	one, several := subjects(args)
	switch op {
	case metarpc.OpGetAttr, metarpc.OpStatFS, metarpc.OpGetXattr, metarpc.OpListXattr:
		if slices.Contains(g.above, one) {
			return nil
		}
	}
	if one != 0 {
		several = []layout.FileID{one}
	}
	for _, id := range several {
		if err := s.below(ctx, g.top, id); err != nil {
			return err
		}
	}
	return nil
}

// below is EACCES for an inode that is not below a directory, such as the one that a session is confined to.
func (s *Service) below(ctx context.Context, top, id layout.FileID) error {
	if id == top {
		return nil
	}
	row, _, err := s.inode(ctx, id)
	if err != nil || row.Parent == 0 && !isDir(row.Mode) {
		return err
	}
	chain, err := s.usage.Ancestors(ctx, row.Parent)
	if err == nil && !slices.Contains(chain, top) {
		err = errAccess
	}
	return err
}

// client names who a session is of, for what holds for all its sessions; sess.mu is held.
func (sess *session) clientName() string {
	if sess.peer.Name != "" {
		return "cert:" + sess.peer.Name
	}
	host, _, err := net.SplitHostPort(sess.address)
	if err != nil {
		return sess.address
	}
	return host
}

// throttle waits until a call may be executed by what its client's rule says of ops. What gives something back does not wait.
func (s *Service) throttle(ctx context.Context, c *call) error {
	c.sess.mu.Lock()
	perSecond, name := c.sess.grant.Ops, ""
	if perSecond > 0 {
		name = c.sess.clientName()
	}
	c.sess.mu.Unlock()
	if perSecond == 0 {
		return nil
	}
	switch c.h.Op {
	case metarpc.OpRenew, metarpc.OpEndSession, metarpc.OpClose, metarpc.OpLayoutReturn, metarpc.OpLayoutCommit, metarpc.OpLeaseReturn, metarpc.OpReclaimComplete,
		metarpc.OpLayoutError, metarpc.OpLayoutStats, metarpc.OpReportDevices:
		return nil
	}
	wait := s.rules.meters.Take(name, perSecond)
	if wait == 0 {
		return nil
	}
	return retry.Pause(ctx, wait)
}

// sessionsOf is how many sessions the client of a connection has.
func (s *Service) sessionsOf(in *admit.Incoming) (n int) {
	from := session{peer: in.Peer, address: in.Conn.RemoteAddr().String()}
	name := from.clientName()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sess := range s.sessions {
		sess.mu.Lock()
		if sess.returned && sess.clientName() == name {
			n++
		}
		sess.mu.Unlock()
	}
	return n
}

// admin refuses a call that is for administrators: root, of a client that may write everywhere.
func (s *Service) admin(c *call) error {
	switch who := s.caller(c); {
	case c.sess.confinement() != nil || !who.Privileged:
		return errPerm
	case who.ReadOnly:
		return errReadOnly
	}
	return nil
}

func (s *Service) clientSet(ctx context.Context, c *call, a *metarpc.ClientSetArgs) (*metarpc.Empty, error) {
	if err := s.admin(c); err != nil {
		return nil, err
	}
	refuse := func(err error) (*metarpc.Empty, error) {
		return nil, refusef(metarpc.Status(syscall.EINVAL), "%v", err)
	}
	whose := a.Whose
	var rule admit.Export
	if a.Rule != "" {
		var err error
		if rule, err = admit.Parse(a.Rule); err != nil {
			return refuse(err)
		}
		if err := s.confine(ctx, &grant{Export: rule}); err != nil {
			return refuse(err)
		}
	} else {
		named, err := admit.Parse(whose)
		if err != nil {
			return refuse(err)
		}
		whose = named.Whose()
	}
	_, err := change(ctx, s, nil, func(t *tx) (*struct{}, error) {
		raw, err := schema.FindRow(ctx, s.engine, schema.KeyClients)
		if err != nil {
			return nil, err
		}
		list, err := parseRules(raw)
		if err != nil {
			return nil, err
		}
		had := len(list)
		list = slices.DeleteFunc(list, func(e admit.Export) bool {
			return a.Rule == "" && e.Whose() == whose || a.Rule != "" && e.Whose() == rule.Whose()
		})
		switch {
		case a.Rule != "":
			list = append(list, rule)
		case len(list) == had:
			return nil, refusef(metarpc.Status(syscall.ENOENT), "there is no rule for %s", whose)
		}
		list.Sort()
		row, size := schema.Clients{}, 0
		for _, e := range list {
			row.Rules = append(row.Rules, e.String())
			size += len(e.String())
		}
		if len(list) > metarpc.MaxBatch || size > maxRuleBytes {
			return nil, refusef(metarpc.Status(syscall.EINVAL), "%d rules of %d bytes are too many: networks, and certificates with *, are for many clients at once", len(list), size)
		}
		c.sess.mu.Lock()
		address, name := c.sess.address, c.sess.peer.Name
		c.sess.mu.Unlock()
		own, ok := append(list[:len(list):len(list)], s.cfg.Exports...).For(address, name)
		if who := own.Caller(c.h.Cred, s.groups.Of); !ok || own.Path != "" || !who.Privileged || own.ReadOnly {
			return nil, refusef(metarpc.Status(syscall.EPERM), "nobody could change the rules from here any more: first set one for this host, such as %s", admit.ForAdmin(address, name))
		}
		if cut := s.cutBy(list); a.Rule != "" && !a.Force && len(cut) > 0 {
			return nil, refusef(metarpc.Status(syscall.EBUSY), "this would cut %d clients off, such as %s, which no rule lets in then: first set one for them, or force it", len(cut), cut[0])
		}
		t.GuardRow(schema.KeyClients, raw)
		if len(list) == 0 {
			t.Delete(schema.KeyClients)
		} else {
			t.Put(schema.KeyClients, schema.Encode(&row))
		}
		return nil, nil
	})
	if err == nil {
		err = s.readRules(ctx)
	}
	if err == nil {
		s.applyRules()
	}
	return &metarpc.Empty{}, err
}

// cutBy are the clients that are connected, and that rules of the volume would not let in.
func (s *Service) cutBy(list admit.Rules) (names []string) {
	list = append(list[:len(list):len(list)], s.cfg.Exports...)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sess := range s.sessions {
		sess.mu.Lock()
		if _, ok := list.For(sess.address, sess.peer.Name); sess.conn != nil && !ok {
			names = append(names, fmt.Sprintf("%s (host %s)", sess.clientName(), sess.client.Host))
		}
		sess.mu.Unlock()
	}
	return names
}

func (s *Service) clientList(ctx context.Context, c *call, _ *metarpc.Empty) (*metarpc.ClientListResult, error) {
	if err := s.admin(c); err != nil && !errors.Is(err, errReadOnly) {
		return nil, err
	}
	if err := s.readRules(ctx); err != nil {
		return nil, err
	}
	s.rules.mu.Lock()
	defer s.rules.mu.Unlock()
	r := &metarpc.ClientListResult{}
	for _, e := range s.rules.list {
		r.Rules = append(r.Rules, e.String())
	}
	for _, e := range s.cfg.Exports {
		r.Given = append(r.Given, e.String())
	}
	return r, nil
}

package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest/etcdserver"
)

// load commits through engines of one catalog until it is told to end, and knows what must be there afterwards.
type load struct {
	engines []*Engine
	stop    chan struct{}
	workers sync.WaitGroup
	done    atomic.Int64 // commits acknowledged

	unknown atomic.Int64 // commits whose outcome is

	mu      sync.Mutex
	rows    map[string]bool // true if acknowledged, false if the outcome is unknown
	slowest time.Duration   // commit
}

const loadWorkers = 12

// startLoad starts workers. Each call of theirs has a context from bound.
func startLoad(t *testing.T, engines []*Engine, bound func() (context.Context, context.CancelFunc)) *load {
	l := &load{engines: engines, stop: make(chan struct{}), rows: map[string]bool{}}
	for w := range loadWorkers {
		l.workers.Go(func() { // ends when l.stop is closed
			for i := 0; ; i++ {
				select {
				case <-l.stop:
					return
				default:
				}
				l.step(t, engines[w%len(engines)], w, i, bound)
			}
		})
	}
	return l
}

// step makes a row that is not there yet, and counts it.
func (l *load) step(t *testing.T, e *Engine, w, i int, bound func() (context.Context, context.CancelFunc)) {
	key := fmt.Sprintf("row/%02d/%06d", w, i)
	b := new(catalog.Batch)
	b.GuardAbsent([]byte(key))
	b.Put([]byte(key), []byte(key))
	b.Add([]byte("count"), 0, 1)
	b.Add(fmt.Appendf(nil, "count/%02d", w), 0, 1)
	ctx, cancel := bound()
	defer cancel()
	begin := time.Now()
	err := e.Commit(ctx, b)
	took := time.Since(begin)
	l.mu.Lock()
	l.slowest = max(l.slowest, took)
	switch {
	case err == nil:
		l.rows[key] = true
		l.done.Add(1)
	case errors.Is(err, catalog.ErrUnknown) && ctx.Err() != nil:
		l.rows[key] = false
		l.unknown.Add(1)
	case ctx.Err() != nil && errors.Is(err, ctx.Err()): // not applied
	default:
		t.Errorf("commit of %s: %v", key, err)
	}
	l.mu.Unlock()
	if err != nil {
		return
	}
	if value, err := e.Get(ctx, []byte(key)); err != nil && ctx.Err() == nil || err == nil && string(value) != key {
		t.Errorf("get %s after its commit: %q, %v", key, value, err)
	}
	// What is put without any guard is there until this worker puts something else.
	last := &catalog.Batch{Puts: []catalog.Row{{Key: fmt.Appendf(nil, "last/%02d", w), Value: []byte(key)}}}
	if err := e.Commit(ctx, last); err != nil {
		if ctx.Err() == nil {
			t.Errorf("commit of %s: %v", last.Puts[0].Key, err)
		}
		if errors.Is(err, catalog.ErrUnknown) {
			l.unknown.Add(1)
		}
		return
	}
	for range 3 {
		if value, err := e.Get(ctx, last.Puts[0].Key); err == nil && string(value) != key {
			t.Errorf("%s went back from %s to %s", last.Puts[0].Key, key, value)
		}
	}
}

// progress waits until n more commits were acknowledged.
func (l *load) progress(t *testing.T, n int64) {
	t.Helper()
	begin := time.Now()
	for want := l.done.Load() + n; l.done.Load() < want; time.Sleep(5 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatalf("%d of %d commits in %v", n-(want-l.done.Load()), n, time.Since(begin))
		}
	}
	t.Logf("%d commits in %v", n, time.Since(begin).Round(time.Millisecond))
}

// end stops the load and checks that what was acknowledged is there, once, and nothing else but what may be.
func (l *load) end(t *testing.T) {
	t.Helper()
	close(l.stop)
	l.workers.Wait()
	there := int64(0)
	for key, acknowledged := range l.rows {
		_, err := l.engines[0].Get(t.Context(), []byte(key))
		if err == nil {
			there++
		}
		if acknowledged && err != nil {
			t.Errorf("%s was acknowledged: %v", key, err)
		}
	}
	rows := int64(0)
	for _, err := range l.engines[0].Scan(t.Context(), []byte("row/"), []byte("row0"), catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		rows++
	}
	if rows != there {
		t.Errorf("%d rows are there, of which %d were acknowledged or may be", rows, there)
	}
	sum := int64(0)
	for w := range loadWorkers {
		sum += counter(t, l.engines[0], fmt.Sprintf("count/%02d", w))
	}
	if n := counter(t, l.engines[0], "count"); n != rows || sum != rows {
		t.Errorf("%d rows, counted as %d and %d", rows, n, sum)
	}
	t.Logf("%d commits acknowledged, %d unknown, the slowest took %v", l.done.Load(), l.unknown.Load(), l.slowest.Round(time.Millisecond))
}

// TestLossOfMembers kills, stops and restarts members of a cluster under load, leaders too. Callers wait and get no error.
func TestLossOfMembers(t *testing.T) {
	t.Parallel()
	cluster := etcdserver.Start(t, 3)
	cfg := configOf(t, cluster.URL("/test"))
	engines := []*Engine{mustOpen(t, cfg), mustOpen(t, cfg)}
	l := startLoad(t, engines, func() (context.Context, context.CancelFunc) { return context.WithCancel(t.Context()) })
	l.progress(t, 100)
	rounds := 2
	if testing.Short() {
		rounds = 1
	}
	for round := range rounds {
		lead := cluster.Leader()
		t.Logf("kill %d, the leader", lead)
		cluster.Kill(lead)
		l.progress(t, 100)
		cluster.Restart(lead)

		follower := (cluster.Leader() + 1 + round) % 3
		t.Logf("stop %d", follower)
		cluster.Stop(follower)
		l.progress(t, 100)
		cluster.Cont(follower)
		l.progress(t, 100)

		lead = cluster.Leader()
		t.Logf("stop %d, the leader", lead)
		cluster.Stop(lead)
		l.progress(t, 100)
		cluster.Cont(lead)
		l.progress(t, 100)
	}
	t.Log("stop two, which ends all progress, and let them go on")
	lead := cluster.Leader()
	cluster.Stop((lead + 1) % 3)
	cluster.Stop((lead + 2) % 3)
	time.Sleep(3 * time.Second) // callers must get through more than one try
	cluster.Cont((lead + 1) % 3)
	cluster.Cont((lead + 2) % 3)
	l.progress(t, 100)
	t.Log("kill all, start all")
	for i := range 3 {
		cluster.Kill(i)
	}
	cluster.RestartAll()
	l.progress(t, 100)
	l.end(t)
	for _, e := range engines {
		mustClose(t, e)
	}
}

// TestOutage has callers that wait for a short time only while there is no majority. What they are told is true.
func TestOutage(t *testing.T) {
	t.Parallel()
	cluster := etcdserver.Start(t, 3)
	cfg := configOf(t, cluster.URL("/test"))
	e := mustOpen(t, cfg)
	l := startLoad(t, []*Engine{e}, func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(t.Context(), 500*time.Millisecond)
	})
	l.progress(t, 100)
	for i := range 2 {
		cluster.Stop(i)
	}
	begin := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	if _, err := e.Get(ctx, []byte("count")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("get: %v", err)
	}
	cancel()
	for l.unknown.Load() == 0 { // until a caller has given up what was sent
		if time.Since(begin) > time.Minute {
			t.Fatal("nobody is told that the outcome is unknown")
		}
		time.Sleep(20 * time.Millisecond)
	}
	for i := range 2 {
		cluster.Cont(i)
	}
	l.progress(t, 100)
	l.end(t)

	// Close does not wait for ever for a cluster that is gone.
	done := make(chan error)
	for i := range 3 {
		cluster.Kill(i)
	}
	go func() {
		done <- e.Commit(t.Context(), &catalog.Batch{Puts: []catalog.Row{{Key: []byte("late")}}})
	}()
	time.Sleep(100 * time.Millisecond) // or else it is refused, which is right too
	begin = time.Now()
	mustClose(t, e)
	if err := <-done; !errors.Is(err, catalog.ErrUnknown) && !errors.Is(err, catalog.ErrClosed) {
		t.Errorf("commit while closing: %v", err)
	}
	if took := time.Since(begin); took > closePatience+patience+5*time.Second {
		t.Errorf("close took %v", took)
	}
}

// lossy loses calls and answers, and has calls carried out long after their answer was given up.
type lossy struct {
	pb.KVClient
	late *sync.WaitGroup
}

func (l lossy) Txn(ctx context.Context, t *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	lost := status.Error(codes.Unavailable, "lost by the test")
	switch rand.IntN(12) {
	case 0:
		return nil, lost
	case 1:
		_, err := l.KVClient.Txn(ctx, t, opts...)
		return nil, errors.Join(lost, err)
	case 2:
		l.late.Go(func() { // ends soon
			time.Sleep(rand.N(50 * time.Millisecond))
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_, _ = l.KVClient.Txn(ctx, t, opts...)
		})
		return nil, lost
	}
	return l.KVClient.Txn(ctx, t, opts...)
}

// TestLostCalls has every fourth transaction without an answer, or carried out late. Nothing is done twice, and callers hear nothing of it.
func TestLostCalls(t *testing.T) {
	t.Parallel()
	cfg := configOf(t, etcdserver.Start(t, 1).URL("/test"))
	var late sync.WaitGroup
	cfg.wrap = func(kv pb.KVClient) pb.KVClient { return lossy{kv, &late} }
	engines := []*Engine{mustOpen(t, cfg), mustOpen(t, cfg)}
	l := startLoad(t, engines, func() (context.Context, context.CancelFunc) { return context.WithCancel(t.Context()) })
	enough := int64(1500)
	if testing.Short() {
		enough = 500
	}
	l.progress(t, enough)
	l.end(t)
	for _, e := range engines {
		mustClose(t, e)
	}
	late.Wait()
}

// TestRefusedForGood has the first call of a transaction carried out only after the second was refused, and after its guard has
// come to hold.
func TestRefusedForGood(t *testing.T) {
	t.Parallel()
	cfg := configOf(t, etcdserver.Start(t, 1).URL("/test"))
	held := new(held)
	cfg.wrap = func(kv pb.KVClient) pb.KVClient { return heldBack{kv, held} }
	e := mustOpen(t, cfg)
	defer mustClose(t, e)
	mustCommit(t, e, func(b *catalog.Batch) { b.Put([]byte("other"), nil) }) // makes the stamp
	enter := new(catalog.Batch)
	enter.GuardPresent([]byte("door"))
	enter.Put([]byte("inside"), nil)
	held.next.Store(true)
	guard := (*catalog.GuardError)(nil)
	if err := e.Commit(t.Context(), enter); !errors.As(err, &guard) {
		t.Fatalf("without a door: %v", err)
	}
	cfg.wrap = nil
	second := mustOpen(t, cfg) // so that the first makes no other transaction
	defer mustClose(t, second)
	mustCommit(t, second, func(b *catalog.Batch) { b.Put([]byte("door"), nil) })
	if _, err := held.kv.Txn(t.Context(), held.txn); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Get(t.Context(), []byte("inside")); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("what was refused has been applied later: %v", err)
	}
}

// held is a transaction that was not sent.
type held struct {
	next atomic.Bool // hold the next one
	kv   pb.KVClient
	txn  *pb.TxnRequest
}

type heldBack struct {
	pb.KVClient
	held *held
}

func (h heldBack) Txn(ctx context.Context, t *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	if h.held.next.CompareAndSwap(true, false) {
		h.held.kv, h.held.txn = h.KVClient, t
		return nil, status.Error(codes.Unavailable, "held back by the test")
	}
	return h.KVClient.Txn(ctx, t, opts...)
}

// TestFenced has a call carried out after its caller has been told that the outcome is unknown and another engine has found out: what was found holds.
func TestFenced(t *testing.T) {
	t.Parallel()
	cfg := configOf(t, etcdserver.Start(t, 1).URL("/test"))
	stuck := new(stuck)
	cfg.wrap = func(kv pb.KVClient) pb.KVClient { return stuckCalls{kv, stuck} }
	e := mustOpen(t, cfg)
	defer mustClose(t, e)
	cfg.wrap = nil
	second := mustOpen(t, cfg)
	defer mustClose(t, second)
	mustCommit(t, e, func(b *catalog.Batch) { b.Put([]byte("other"), nil) }) // makes the stamp

	batch := new(catalog.Batch)
	batch.GuardAbsent([]byte("reply"))
	batch.Put([]byte("reply"), []byte("done"))
	batch.Put([]byte("file"), nil)
	ctx, cancel := context.WithCancel(t.Context())
	stuck.on(cancel)
	if err := e.Commit(ctx, batch); !errors.Is(err, catalog.ErrUnknown) {
		t.Fatalf("while the cluster does not answer: %v", err)
	}
	if err := second.Commit(t.Context(), new(catalog.Batch)); err != nil {
		t.Fatal(err)
	}
	mustCommit(t, second, func(b *catalog.Batch) {
		b.GuardAbsent([]byte("reply"))
		b.Put([]byte("reply"), []byte("fenced"))
	})
	if _, err := stuck.kv.Txn(t.Context(), stuck.txn); err != nil {
		t.Fatal(err)
	}
	stuck.off()
	mustCommit(t, e, func(b *catalog.Batch) { b.Put([]byte("other"), nil) }) // after the one that was stuck
	if _, err := second.Get(t.Context(), []byte("file")); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("what was found not to be committed is there: %v", err)
	}
	if reply, err := e.Get(t.Context(), []byte("reply")); err != nil || string(reply) != "fenced" {
		t.Errorf("reply %q, %v", reply, err)
	}
}

// stuck has transactions kept back, and the first of them.
type stuck struct {
	mu     sync.Mutex
	caught func() // not nil while they are; called with each
	kv     pb.KVClient
	txn    *pb.TxnRequest
}

func (s *stuck) on(caught func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.caught = caught
}

func (s *stuck) off() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.caught = nil
}

type stuckCalls struct {
	pb.KVClient
	stuck *stuck
}

func (s stuckCalls) Txn(ctx context.Context, t *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	s.stuck.mu.Lock()
	defer s.stuck.mu.Unlock()
	if s.stuck.caught == nil {
		return s.KVClient.Txn(ctx, t, opts...)
	}
	if s.stuck.txn == nil {
		s.stuck.kv, s.stuck.txn = s.KVClient, t
	}
	s.stuck.caught()
	return nil, status.Error(codes.Unavailable, "kept back by the test")
}

// TestStampGone removes the stamp of an engine between its transactions, and while the outcome of one is not clear.
func TestStampGone(t *testing.T) {
	t.Parallel()
	cfg := configOf(t, etcdserver.Start(t, 1).URL("/test"))
	var e *Engine
	var lose atomic.Bool
	cfg.wrap = func(kv pb.KVClient) pb.KVClient { return &unstamped{KVClient: kv, e: &e, lose: &lose} }
	e = mustOpen(t, cfg)
	defer func() { mustClose(t, e) }()
	put := func() error {
		return e.Commit(t.Context(), &catalog.Batch{Puts: []catalog.Row{{Key: []byte("row")}}})
	}
	if err := put(); err != nil {
		t.Fatal(err)
	}
	first := string(e.stamp.key)
	if _, err := e.cluster.txn(t.Context(), 0, &pb.TxnRequest{Success: []*pb.RequestOp{opDelete(e.stamp.key)}}); err != nil {
		t.Fatal(err)
	}
	if err := put(); err != nil {
		t.Errorf("after the stamp was removed: %v", err)
	}
	if string(e.stamp.key) == first {
		t.Errorf("the stamp has the key of one that was removed")
	}
	lose.Store(true)
	if err := put(); !errors.Is(err, catalog.ErrUnknown) {
		t.Errorf("the stamp was removed while its transaction was not clear: %v", err)
	}
	if err := put(); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// unstamped loses, once, the answer to a transaction and then the stamp.
type unstamped struct {
	pb.KVClient
	e    **Engine
	lose *atomic.Bool
}

func (u *unstamped) Txn(ctx context.Context, t *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	resp, err := u.KVClient.Txn(ctx, t, opts...)
	if err == nil && u.lose.CompareAndSwap(true, false) {
		_, err = u.KVClient.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{opDelete((*u.e).stamp.key)}})
		return nil, errors.Join(status.Error(codes.Unavailable, "lost by the test"), err)
	}
	return resp, err
}

// TestForgottenCalls has the members never answer the first transaction that each of them gets, as when they have lost
// their leader. The transaction is made again while those are still waited for.
func TestForgottenCalls(t *testing.T) {
	t.Parallel()
	cfg := configOf(t, etcdserver.Start(t, 3).URL("/test"))
	f := new(forgetful)
	cfg.wrap = func(kv pb.KVClient) pb.KVClient { return forgottenCalls{kv, f} }
	e := mustOpen(t, cfg)
	defer mustClose(t, e)
	mustCommit(t, e, func(b *catalog.Batch) { b.Put([]byte("other"), nil) }) // makes the stamp
	f.left.Store(3)
	mustCommit(t, e, func(b *catalog.Batch) {
		b.Put([]byte("row"), nil)
		b.Add([]byte("count"), 0, 1)
	})
	if f.left.Load() >= 0 || f.givenUp.Load() > 0 {
		t.Errorf("%d calls were given up before there was an answer", f.givenUp.Load())
	}
	if n := counter(t, e, "count"); n != 1 {
		t.Errorf("counted %d", n)
	}
}

type forgetful struct {
	left    atomic.Int64 // transactions to be forgotten
	givenUp atomic.Int64 // those of them that were, as they had no answer for too long
}

type forgottenCalls struct {
	pb.KVClient
	f *forgetful
}

func (c forgottenCalls) Txn(ctx context.Context, t *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	if c.f.left.Add(-1) < 0 {
		return c.KVClient.Txn(ctx, t, opts...)
	}
	<-ctx.Done()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		c.f.givenUp.Add(1)
	}
	return nil, ctx.Err()
}

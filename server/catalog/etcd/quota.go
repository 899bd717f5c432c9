package etcd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

const (
	quotaEvery    = 2 * time.Second
	quotaPatience = 2 * time.Second // for an answer
	metricsMost   = 8 << 20         // bytes of an answer that are read
)

// quota is what is known of the cluster's space quota, see Quota in the package comment.
type quota struct {
	mu   sync.Mutex
	room catalog.Room
}

// Room implements [catalog.Roomy].
func (e *Engine) Room() catalog.Room {
	e.quota.mu.Lock()
	defer e.quota.mu.Unlock()
	return e.quota.room
}

// refuse returns an error for a batch with Grows when only the reserve is left: that of its guards, or ErrFull.
func (e *Engine) refuse(ctx context.Context, b *catalog.Batch) error {
	if !b.Grows || !e.Room().Full {
		return nil
	}
	if err := e.Commit(ctx, &catalog.Batch{Guards: b.Guards}); err != nil {
		return err
	}
	return fmt.Errorf("%w: etcd has used up its space quota, but for a reserve: "+
		"remove files, or give it a larger --quota-backend-bytes", catalog.ErrFull)
}

// watchQuota reads how much of its quota the cluster has used, again and again until the engine's life ends.
func (e *Engine) watchQuota() {
	transport := &http.Transport{TLSClientConfig: e.cfg.TLS}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: quotaPatience}
	for timer := time.NewTimer(0); ; timer.Reset(quotaEvery) {
		select {
		case <-timer.C:
		case <-e.life.Done():
			timer.Stop()
			return
		}
		if err := e.readQuota(client); err != nil {
			e.cfg.Logger.Debug("catalog: cannot read how much of its quota etcd has used", "err", err)
		}
	}
}

func (e *Engine) readQuota(client *http.Client) error {
	s, err := e.sizes(client)
	if err == nil {
		e.judgeRoom(s)
	}
	return err
}

// sizes are those of a member's database, in bytes.
type sizes struct {
	quota int64
	total int64 // of the file, which never shrinks by itself
	used  int64 // pages of the file that are not free
}

// sizes reads the metrics of the member that calls go to.
func (e *Engine) sizes(client *http.Client) (sizes, error) {
	scheme := "http://"
	if e.cfg.TLS != nil {
		scheme = "https://"
	}
	url := scheme + e.cluster.members[e.cluster.current.Load()].endpoint + "/metrics"
	req, err := http.NewRequestWithContext(e.life, http.MethodGet, url, nil)
	if err != nil {
		return sizes{}, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return sizes{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return sizes{}, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return parseSizes(resp.Body)
}

// parseSizes finds the sizes in the metrics of a member.
func parseSizes(r io.Reader) (s sizes, err error) {
	wanted := map[string]*int64{
		"etcd_server_quota_backend_bytes":         &s.quota,
		"etcd_mvcc_db_total_size_in_bytes":        &s.total,
		"etcd_mvcc_db_total_size_in_use_in_bytes": &s.used,
	}
	lines := bufio.NewScanner(io.LimitReader(r, metricsMost))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if n := wanted[name]; n != nil {
			f, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return sizes{}, err
			}
			*n = int64(f)
		}
	}
	if err := lines.Err(); err != nil {
		return sizes{}, err
	}
	if s.quota <= 0 || s.total <= 0 || s.used <= 0 {
		return sizes{}, errors.New("not all sizes are among the metrics")
	}
	return s, nil
}

// roomOf returns the room that these sizes leave. A state lasts until there is some more room than when it began.
func roomOf(s sizes, before catalog.Room) catalog.Room {
	reserve := min(max(s.quota/50, 4<<20), 1<<30, s.quota/4)
	spare, free := s.quota-s.total, s.quota-s.used
	// The file grows before all of its free pages are used, as they are too small or too scattered for some writes.
	within := func(n int64, before bool) bool {
		if before {
			n++
		}
		return spare < n*reserve && free < (n+1)*reserve
	}
	full := within(1, before.Full)
	return catalog.Room{
		Free: max(free-reserve, 0), Size: s.quota, Reserve: min(reserve, max(free, 0)),
		Full: full, Low: full || within(3, before.Low),
	}
}

// judgeRoom notes what a member says, and logs changes of state.
func (e *Engine) judgeRoom(s sizes) {
	e.quota.mu.Lock()
	before := e.quota.room
	now := roomOf(s, before)
	e.quota.room = now
	e.quota.mu.Unlock()
	log := e.cfg.Logger.With("quota_bytes", s.quota, "file_bytes", s.total, "used_bytes", s.used)
	switch {
	case now.Full && !before.Full:
		log.Error("catalog: etcd has used up its quota, but for a reserve: nothing new can be made in the volume until there is room; " +
			"reads, and what makes room, go on from the reserve")
	case before.Full && !now.Full:
		log.Info("catalog: etcd has room again")
	case now.Low && !before.Low:
		log.Warn("catalog: etcd has nearly used up its quota; without room nothing new can be made in the volume")
	case before.Low && !now.Low:
		log.Info("catalog: etcd no longer has nearly used up its quota")
	}
}

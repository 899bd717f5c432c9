// Package metrics serves what a program has counted over HTTP, in Prometheus' text format, with whether it is well: /metrics, /healthz, /readyz, and, if that is
// asked for, /debug/pprof/. Numbers are kept where they arise and collected when somebody asks.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/hist"
)

// Config says what there is to see.
type Config struct {
	Collect func(Emit)                  // called for each scrape, by several goroutines
	Ready   func(context.Context) error // nil if the program does what it is for, or else why not
	Profile bool                        // with /debug/pprof/
	Log     *slog.Logger
}

// readyTime bounds Config.Ready.
const readyTime = 5 * time.Second

// Server answers at an address.
type Server struct {
	Addr net.Addr
	http http.Server
}

// Listen serves at HOST:PORT until Close.
func Listen(addr string, cfg Config) (*Server, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics at %s: %w (want HOST:PORT)", addr, err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector{cfg.Collect}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelError)}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), readyTime)
		defer cancel()
		if err := cfg.Ready(ctx); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	if cfg.Profile {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	s := &Server{Addr: l.Addr(), http: http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}}
	go func() { // ends with Close
		if err := s.http.Serve(descriptors.Listener(l)); !errors.Is(err, http.ErrServerClosed) {
			cfg.Log.Error("metrics are not served any more", "err", err)
		}
	}()
	cfg.Log.Info("metrics are served", "address", l.Addr().String())
	return s, nil
}

// Close ends it at once.
func (s *Server) Close() error { return s.http.Close() }

// collector makes metrics when it is asked, and so describes none.
type collector struct{ collect func(Emit) }

func (collector) Describe(chan<- *prometheus.Desc)      {}
func (c collector) Collect(ch chan<- prometheus.Metric) { c.collect(Emit{ch}) }

// Emit takes the metrics of one scrape. Labels are names and values in turn.
type Emit struct{ ch chan<- prometheus.Metric }

// Counter is a number that only grows. Its name ends in _total.
func (e Emit) Counter(name, help string, value float64, labels ...string) {
	e.send(name, help, prometheus.CounterValue, value, labels)
}

// Gauge is a number.
func (e Emit) Gauge(name, help string, value float64, labels ...string) {
	e.send(name, help, prometheus.GaugeValue, value, labels)
}

// Flag is a gauge that is 1 or 0.
func (e Emit) Flag(name, help string, value bool, labels ...string) {
	n := 0.0
	if value {
		n = 1
	}
	e.Gauge(name, help, n, labels...)
}

func (e Emit) send(name, help string, kind prometheus.ValueType, value float64, labels []string) {
	desc, values := describe(name, help, labels)
	e.ch <- prometheus.MustNewConstMetric(desc, kind, value, values...)
}

func describe(name, help string, labels []string) (*prometheus.Desc, []string) {
	var names, values []string
	for i := 0; i < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	return prometheus.NewDesc(name, help, names, nil), values
}

// Of a histogram every second boundary is shown, from 8 µs to 69 s.
const firstBucket, lastBucket = 13, 36

// Histogram is how long things took, in seconds. Its name ends in _seconds.
func (e Emit) Histogram(name, help string, c *hist.Counts, labels ...string) {
	desc, values := describe(name, help, labels)
	buckets, seen := map[float64]uint64{}, uint64(0)
	for i, n := range c.N {
		seen += n
		if i >= firstBucket && i <= lastBucket && (i-firstBucket)%2 == 0 {
			buckets[float64(uint64(1)<<i)/1e9] = seen
		}
	}
	e.ch <- prometheus.MustNewConstHistogram(desc, seen, c.Sum.Seconds(), buckets, values...)
}

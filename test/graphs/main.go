// Command graphs draws docs/monitoring.png: the main panels of the dashboard, as Prometheus has seen a run of some minutes.
//
//	scripts/build && go run -C test/graphs . ../../docs/monitoring.png
//
// It starts a volume, a mount and a Prometheus of its own, on loopback addresses, and ends them. It needs fio and prometheus. It is a module of
// its own, so that weft's is not one that draws.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

const (
	columns = 2
	width   = 12 * vg.Centimeter // of a panel
	height  = 7 * vg.Centimeter
	dpi     = 110
	scrape  = 1 // seconds
)

// drawn are the panels, by their titles in the dashboard.
var drawn = []string{
	"Mounts: bytes a second", "Mounts: requests of the kernel a second",
	"Mounts: 99 of 100 requests of the kernel within", "Data servers: bytes a second",
	"Data servers: 99 of 100 reads within", "Written and not stable yet",
	"Metadata: calls a second", "Metadata: 99 of 100 calls within",
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: go run -C test/graphs . FILE.png")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "graphs:", err)
		os.Exit(1)
	}
}

// run does some work on a volume and draws what Prometheus has seen of it.
func run(ctx context.Context, file string) (err error) {
	root, err := filepath.Abs("../..")
	if err != nil {
		return err
	}
	base, err := os.MkdirTemp("", "weft-graphs-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(base)
	mnt := filepath.Join(base, "mnt")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		return err
	}
	addrs, err := freeAddrs(4)
	if err != nil {
		return err
	}
	service, serviceAt, mountAt, promAt := addrs[0], addrs[1], addrs[2], addrs[3]
	weft, weftd := filepath.Join(root, "bin/weft"), filepath.Join(root, "bin/weftd")
	config := fmt.Sprintf("global: {scrape_interval: %ds}\nscrape_configs:\n  - {job_name: weft-meta, static_configs: [{targets: [%q]}]}\n  - {job_name: weft-mount, static_configs: [{targets: [%q]}]}\n",
		scrape, serviceAt, mountAt)
	if err := os.WriteFile(filepath.Join(base, "prometheus.yml"), []byte(config), 0o644); err != nil {
		return err
	}
	for _, args := range [][]string{
		{weftd, "single", "--dir", filepath.Join(base, "volume"), "--listen", service, "--metrics", serviceAt},
		{"prometheus", "--config.file", filepath.Join(base, "prometheus.yml"), "--storage.tsdb.path", filepath.Join(base, "data"), "--web.listen-address", promAt, "--log.level", "warn"},
	} {
		cmd := exec.Command(args[0], args[1:]...)
		if err := cmd.Start(); err != nil {
			return err
		}
		defer func() {
			cmd.Process.Signal(syscall.SIGTERM)
			cmd.Wait()
		}()
	}
	for _, addr := range []string{service, promAt} {
		if err := listens(ctx, addr); err != nil {
			return err
		}
	}
	if err := command(ctx, weft, "mount", "-o", "xprtsec=none,localio=off,metrics="+mountAt, service+":/", mnt); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, command(context.Background(), weft, "umount", mnt)) }()
	began := time.Now()
	if err := work(ctx, mnt); err != nil {
		return err
	}
	panels, err := readPanels(filepath.Join(root, "scripts/deploy/grafana-dashboard.json"))
	if err != nil {
		return err
	}
	img, err := picture(ctx, "http://"+promAt, panels, began, time.Now())
	if err != nil {
		return err
	}
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	return errors.Join(png.Encode(out, img), out.Close())
}

// work writes and reads large files, reads small pieces of them, and makes and removes small ones.
func work(ctx context.Context, dir string) error {
	pause := func() { time.Sleep(8 * time.Second) }
	fio := func(args ...string) error {
		return command(ctx, "fio", append([]string{"--name=large", "--directory=" + dir, "--filename=large", "--size=2g", "--direct=1", "--ioengine=libaio", "--time_based", "--output=/dev/null"}, args...)...)
	}
	pause()
	for _, args := range [][]string{
		{"--rw=write", "--bs=1m", "--iodepth=8", "--runtime=30", "--end_fsync=1"},
		{"--rw=read", "--bs=1m", "--iodepth=8", "--runtime=30"},
		{"--rw=randrw", "--rwmixread=80", "--bs=4k", "--iodepth=16", "--runtime=30"},
	} {
		if err := fio(args...); err != nil {
			return err
		}
		pause()
	}
	end := time.Now().Add(30 * time.Second)
	errs := make([]error, 8)
	var all sync.WaitGroup
	for w := range errs {
		all.Go(func() { // makes and removes files until end
			for n := 0; errs[w] == nil && time.Now().Before(end) && ctx.Err() == nil; n++ {
				name := filepath.Join(dir, fmt.Sprintf("small-%d-%d", w, n))
				errs[w] = errors.Join(os.WriteFile(name, make([]byte, 16<<10), 0o644), os.Remove(name))
			}
		})
	}
	all.Wait()
	pause()
	return errors.Join(errors.Join(errs...), ctx.Err())
}

func command(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

func freeAddrs(n int) (addrs []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}

func listens(ctx context.Context, addr string) error {
	for range 200 {
		if c, err := net.Dial("tcp", addr); err == nil {
			return c.Close()
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return fmt.Errorf("nothing listens at %s", addr)
}

// panel is one of the dashboard.
type panel struct {
	Title       string
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct{ Expr, LegendFormat string }
}

// readPanels returns those that are drawn.
func readPanels(file string) (list []panel, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var board struct{ Panels []panel }
	if err := json.Unmarshal(text, &board); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for _, title := range drawn {
		i := slices.IndexFunc(board.Panels, func(p panel) bool { return p.Title == title })
		if i < 0 {
			return nil, fmt.Errorf("%s: there is no panel %q", file, title)
		}
		list = append(list, board.Panels[i])
	}
	return list, nil
}

// line is a series as Prometheus tells it.
type line struct {
	Metric map[string]string
	Values [][2]any // a time in seconds, and a number as text
}

// ask asks Prometheus for what an expression has been from one time to another.
func ask(ctx context.Context, prometheus, expr string, from, to time.Time) ([]line, error) {
	q := url.Values{
		"query": {strings.ReplaceAll(expr, "$__rate_interval", "5s")},
		"start": {strconv.FormatInt(from.Unix(), 10)}, "end": {strconv.FormatInt(to.Unix(), 10)}, "step": {strconv.Itoa(2 * scrape)},
	}
	req, err := http.NewRequestWithContext(ctx, "GET", prometheus+"/api/v1/query_range?"+q.Encode(), nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var r struct {
		Status, Error string
		Data          struct{ Result []line }
	}
	if err := json.NewDecoder(answer.Body).Decode(&r); err != nil || r.Status != "success" {
		return nil, fmt.Errorf("%s: %s %s (%v)", expr, answer.Status, r.Error, err)
	}
	return r.Data.Result, nil
}

// points are those of a line, in seconds since a time. What is no number, as a quantile of nothing, leaves a hole.
func (l *line) points(since time.Time) (parts []plotter.XYs, most float64) {
	open := false
	for _, v := range l.Values {
		at, ok := v[0].(float64)
		text, _ := v[1].(string)
		n, err := strconv.ParseFloat(text, 64)
		if !ok || err != nil || math.IsNaN(n) || math.IsInf(n, 0) {
			open = false
			continue
		}
		if !open {
			parts = append(parts, nil)
			open = true
		}
		last := &parts[len(parts)-1]
		*last = append(*last, plotter.XY{X: at - float64(since.UnixNano())/1e9, Y: n})
		most = max(most, n)
	}
	return parts, most
}

// legend fills in the labels of a series.
func legend(format string, labels map[string]string) string {
	for name, value := range labels {
		if name == "device" {
			value = value[:min(8, len(value))]
		}
		format = strings.ReplaceAll(format, "{{"+name+"}}", value)
	}
	return format
}

// picture draws panels from what a Prometheus has seen.
func picture(ctx context.Context, prometheus string, panels []panel, from, to time.Time) (image.Image, error) {
	rows := (len(panels) + columns - 1) / columns
	canvas := vgimg.NewWith(vgimg.UseWH(columns*width, vg.Length(rows)*height), vgimg.UseDPI(dpi))
	tiles := draw.Tiles{Rows: rows, Cols: columns, PadX: 6 * vg.Millimeter, PadY: 4 * vg.Millimeter, PadTop: 2 * vg.Millimeter, PadBottom: 2 * vg.Millimeter, PadLeft: 2 * vg.Millimeter, PadRight: 4 * vg.Millimeter}
	whole := draw.New(canvas)
	whole.SetColor(color.White)
	for i, p := range panels {
		drawing, err := p.plot(ctx, prometheus, from, to)
		if err != nil {
			return nil, fmt.Errorf("panel %q: %w", p.Title, err)
		}
		drawing.Draw(tiles.At(whole, i%columns, i/columns))
	}
	return canvas.Image(), nil
}

// maxLines is how many series a panel has at most: those that were largest.
const maxLines = 8

func (p *panel) plot(ctx context.Context, prometheus string, from, to time.Time) (*plot.Plot, error) {
	type series struct {
		name  string
		parts []plotter.XYs
		most  float64
	}
	var all []series
	for _, target := range p.Targets {
		lines, err := ask(ctx, prometheus, target.Expr, from, to)
		if err != nil {
			return nil, err
		}
		for _, l := range lines {
			parts, most := l.points(from)
			all = append(all, series{legend(target.LegendFormat, l.Metric), parts, most})
		}
	}
	if len(all) == 0 {
		return nil, errors.New("there is nothing to draw")
	}
	// What was 0 all the time is left out, unless all was.
	if busy := slices.DeleteFunc(slices.Clone(all), func(s series) bool { return s.most == 0 }); len(busy) > 0 {
		all = busy
	}
	slices.SortFunc(all, func(a, b series) int { return strings.Compare(a.name, b.name) })
	if len(all) > maxLines {
		byMost := slices.Clone(all)
		slices.SortFunc(byMost, func(a, b series) int {
			switch {
			case a.most > b.most:
				return -1
			case a.most < b.most:
				return 1
			}
			return 0
		})
		least := byMost[maxLines-1].most
		all = slices.DeleteFunc(all, func(s series) bool { return s.most < least })
	}
	d := plot.New()
	d.Title.Text = p.Title
	d.X.Label.Text = "seconds"
	d.Y.Tick.Marker = ticks(p.FieldConfig.Defaults.Unit)
	d.Y.Min = 0
	d.Legend.Top = true
	d.Legend.TextStyle.Font.Size = vg.Points(8)
	d.Add(plotter.NewGrid())
	for i, s := range all {
		for n, part := range s.parts {
			l, err := plotter.NewLine(part)
			if err != nil {
				return nil, err
			}
			l.Color, l.Width = plotutil.Color(i), vg.Points(1.2)
			l.Dashes = plotutil.Dashes(i / len(plotutil.DefaultColors))
			d.Add(l)
			if n == 0 {
				d.Legend.Add(s.name, l)
			}
		}
	}
	d.X.Min, d.X.Max = 0, to.Sub(from).Seconds()*1.25 // with room for the legend
	d.Y.Min = 0
	return d, nil
}

// ticks writes numbers with a unit of Grafana.
type ticks string

func (unit ticks) Ticks(least, most float64) []plot.Tick {
	list := plot.DefaultTicks{}.Ticks(least, most)
	for i := range list {
		if t := &list[i]; t.Label != "" {
			t.Label = unit.format(t.Value)
		}
	}
	return list
}

func (unit ticks) format(v float64) string {
	base, steps, suffix := 1000.0, []string{"", "k", "M", "G", "T"}, ""
	switch unit {
	case "s":
		if v < 1e-3 {
			return strconv.FormatFloat(v*1e6, 'g', 4, 64) + "µs"
		}
		if v < 1 {
			return strconv.FormatFloat(v*1e3, 'g', 4, 64) + "ms"
		}
		return strconv.FormatFloat(v, 'g', 4, 64) + "s"
	case "Bps":
		suffix = "B/s"
	case "bytes":
		suffix = "B"
	}
	n := 0
	for v >= base && n < len(steps)-1 {
		v, n = v/base, n+1
	}
	return strings.TrimSpace(strconv.FormatFloat(v, 'g', 4, 64) + " " + steps[n] + suffix)
}

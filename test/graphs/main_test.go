package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestPicture draws the panels of the dashboard from what a server tells in the way of Prometheus.
func TestPicture(t *testing.T) {
	panels, err := readPanels("../../scripts/deploy/grafana-dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		q := r.URL.Query()
		if r.URL.Path != "/api/v1/query_range" || strings.Contains(q.Get("query"), "$") {
			t.Errorf("asked for %s", r.URL)
		}
		from, err := strconv.ParseInt(q.Get("start"), 10, 64)
		if err != nil {
			t.Error(err)
		}
		values := []any{}
		for i := range int64(100) {
			n := fmt.Sprint(i * 1000)
			if i%10 == 9 {
				n = "NaN"
			}
			values = append(values, []any{from + i, n})
		}
		json.NewEncoder(w).Encode(map[string]any{"status": "success", "data": map[string]any{"result": []any{
			map[string]any{"metric": map[string]string{"op": "read", "device": "0123456789"}, "values": values},
		}}})
	}))
	defer server.Close()
	from := time.Now()
	img, err := picture(t.Context(), server.URL, panels, from, from.Add(100*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if asked < len(drawn) {
		t.Errorf("%d questions for %d panels", asked, len(drawn))
	}
	// Each panel has a line of the first colour.
	size := img.Bounds().Size()
	rows := (len(panels) + columns - 1) / columns
	found := map[[2]int]int{}
	for y := range size.Y {
		for x := range size.X {
			if r, g, b, _ := img.At(x, y).RGBA(); r > 0xe000 && g < 0xa000 && b < 0xa000 {
				found[[2]int{x * columns / size.X, y * rows / size.Y}]++
			}
		}
	}
	for i := range panels {
		if n := found[[2]int{i % columns, i / columns}]; n < 100 {
			t.Errorf("panel %q: %d coloured points", panels[i].Title, n)
		}
	}
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		unit ticks
		v    float64
		want string
	}{
		{"Bps", 0, "0 B/s"}, {"Bps", 2.5e8, "250 MB/s"}, {"ops", 12000, "12 k"}, {"ops", 5, "5"}, {"s", 0.0005, "500µs"}, {"s", 0.25, "250ms"}, {"s", 2, "2s"}, {"bytes", 3e6, "3 MB"},
	} {
		if got := c.unit.format(c.v); got != c.want {
			t.Errorf("%v of %s: %q, want %q", c.v, c.unit, got, c.want)
		}
	}
}

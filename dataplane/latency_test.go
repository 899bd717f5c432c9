package dataplane

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/hist"
	"github.com/weftfs/weft/layout"
)

// Quantiles of random times, against the sorted times.
func TestQuantile(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	if got := new(Latency).Quantile(0.5); got != 0 {
		t.Errorf("%v without requests", got)
	}
	for range 2000 {
		var u usage
		times := make([]int64, 1+rnd.IntN(200))
		sum := int64(0)
		for i := range times {
			times[i] = rnd.Int64N(1 << (1 + rnd.IntN(hist.Buckets-1)))
			sum += times[i]
			u.ended(&layout.Op{Kind: layout.OpWrite, N: i}, times[i])
		}
		slices.Sort(times)
		st := u.kind(layout.OpWrite).stats()
		n := len(times)
		if st.Ops() != uint64(n) || st.Time != time.Duration(sum) || st.Bytes != uint64(n*(n-1)/2) {
			t.Fatalf("%d requests, %v, %d bytes of %d, %v, %d", st.Ops(), st.Time, st.Bytes, n, time.Duration(sum), n*(n-1)/2)
		}
		for _, q := range []float64{0.001, 0.5, 0.9, 0.99, 1, rnd.Float64()} {
			want := float64(times[max(0, int(math.Ceil(q*float64(n)))-1)])
			if got := float64(st.Latency.Quantile(q)); got > 1.5*want || want > 1.5*got {
				t.Fatalf("quantile %v of %v is %v, want about %v", q, times, got, want)
			}
		}
	}
	// What takes longer than the last element says counts there.
	var u usage
	u.ended(&layout.Op{Kind: layout.OpRead}, math.MaxInt64)
	if st := u.kind(layout.OpRead).stats(); st.Latency[hist.Buckets-1] != 1 {
		t.Errorf("%v", st.Latency)
	}
}

func BenchmarkUsage(b *testing.B) {
	var u usage
	op := &layout.Op{Kind: layout.OpRead, N: 4096}
	b.ReportAllocs()
	for b.Loop() {
		u.outstanding.Add(1)
		u.ended(op, 150_000)
	}
}

package nvmetcp

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// service is what a metadata service knows of a data file: which of its blocks are valid. It gives out segments.
type service struct {
	df layout.DataFile

	mu    sync.Mutex
	valid []bool // by block
	block int64
	seg   *layout.Segment
}

// validate makes blocks valid.
func (v *service) validate(all []dataplane.Written) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, w := range all {
		for _, r := range w.Ranges {
			for b := r.Off / v.block; b < r.End()/v.block; b++ {
				v.valid[b] = true
			}
		}
	}
	v.seg = v.grant()
}

// grant makes a segment of what is valid now. mu is held, or nobody else has v.
func (v *service) grant() *layout.Segment {
	df := v.df
	df.Extents = nil
	for _, e := range v.df.Extents {
		for at := e.Off; at < e.End(); at += v.block {
			state := e.State
			if state == layout.ExtentInvalid && v.valid[at/v.block] {
				state = layout.ExtentReadWrite
			}
			if n := len(df.Extents); n > 0 && at > e.Off && df.Extents[n-1].State == state {
				df.Extents[n-1].Len += v.block
				continue
			}
			df.Extents = append(df.Extents, layout.Extent{Off: at, Len: v.block, Addr: e.Addr + at - e.Off, State: state})
		}
	}
	return &layout.Segment{Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW, Mirrors: []layout.Mirror{{Servers: []layout.DataFile{df}}}}
}

func (v *service) segment() *layout.Segment {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.seg
}

// Several goroutines with bytes of their own, in blocks that they share, through the data plane: reads, writes, punches,
// commits, validations and losses of power. What is acknowledged must be read, and what was validated must be there
// after everything but the namespace is gone.
func TestTargetModel(t *testing.T) {
	for name, format := range formats {
		t.Run(name, func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			space := newMemSpace(t, format, 4<<20, seed)
			space.shuffle = true
			testModel(t, space, space, 600, 20, space.fail, seed)
		})
	}
}

// await is what comes from done, if it comes before ctx ends.
func await(ctx context.Context, done chan error) error {
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("no Done: %w", ctx.Err())
	}
}

// testModel lets each worker take some steps on what is kept in memory and reached by space. Of 1000 steps in
// so many the power fails afterwards.
func testModel(t *testing.T, memory *memSpace, space Space, steps, failures int, fail func(chance float64), seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 13))
	format := memory.format
	const size = 1 << 20
	ctx, cancel := context.WithTimeout(context.Background(), 4*testPatience)
	defer cancel()
	id := layout.DeviceID{1}
	dial := func(layout.DeviceID) (dataplane.Target, error) { return NewTarget(space) }
	plane, err := dataplane.New(dataplane.Config{Dial: dial, RetainBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer plane.Close()
	v := &service{block: int64(format.BlockSize), valid: make([]bool, size/format.BlockSize)}
	v.df = *memory.file(size, func() layout.ExtentState {
		return []layout.ExtentState{layout.ExtentReadWrite, layout.ExtentInvalid, layout.ExtentInvalid}[rnd.IntN(3)]
	})
	v.df.Device = id
	v.seg = v.grant()
	f := plane.NewFile()

	model := make([]byte, size)
	const workers = 4
	owned := make([][]layout.Range, workers)
	for at, i := int64(0), 0; at < size; i++ {
		n := min(size-at, 1+rnd.Int64N(1<<(4+rnd.IntN(12))))
		owned[i%workers] = append(owned[i%workers], layout.Range{Off: at, Len: n})
		at += n
	}
	var quiet sync.RWMutex // held to know that no older segment is in use
	var validating sync.Mutex
	var wg sync.WaitGroup
	for g := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, 100+uint64(g)))
			for step := range steps {
				r := owned[g][rnd.IntN(len(owned[g]))]
				off := r.Off + rnd.Int64N(r.Len)
				n := 1 + rnd.Int64N(r.End()-off)
				own := model[off : off+n]
				quiet.RLock()
				seg := v.segment()
				var err error
				switch k := rnd.IntN(100); {
				case k < 45:
					data := make([]byte, n)
					for i := range data {
						data[i] = byte(1 + rnd.IntN(0x7f))
					}
					done := make(chan error, 1)
					w := &dataplane.Write{Segment: seg, Data: slices.Clone(data), Off: off, Done: func(err error) { done <- err }}
					if rnd.IntN(4) == 0 {
						w.Stable = layout.DataSync
					}
					f.StartWrite(w)
					plane.Flush()
					if w.Stable != 0 && rnd.IntN(2) == 0 {
						w.Detach()
						for i := range w.Data {
							w.Data[i] = 0xee
						}
					}
					if err = await(ctx, done); err == nil {
						copy(own, data)
					} else if err == context.Canceled {
						err = nil
					}
				case k < 85:
					buf := bytes.Repeat([]byte{0x99}, int(n))
					done := make(chan error, 1)
					f.StartRead(&dataplane.Read{Segment: seg, Buf: buf, Off: off, Done: func(_ int, err error) { done <- err }})
					plane.Flush()
					if err = await(ctx, done); err == nil && !bytes.Equal(buf, own) {
						i := 0
						for buf[i] == own[i] {
							i++
						}
						t.Errorf("worker %d, step %d: READ of %d bytes at %d differs at %d: %#x, want %#x", g, step, n, off, off+int64(i), buf[i], own[i])
						quiet.RUnlock()
						return
					}
				case k < 90:
					if err = f.Punch(ctx, seg, off, n, func(error) {}); err == nil {
						clear(own)
					}
				case k < 95:
					err = f.Commit(ctx)
				default:
					validating.Lock()
					all := f.Written()
					v.validate(all)
					f.Validated(all)
					validating.Unlock()
				}
				if rnd.IntN(1000) < failures {
					fail(rnd.Float64())
				}
				quiet.RUnlock()
				if err != nil {
					t.Errorf("worker %d, step %d: %v", g, step, err)
					return
				}
				if rnd.IntN(50) == 0 {
					quiet.Lock()
					f.Forget()
					quiet.Unlock()
				}
			}
		})
	}
	wg.Wait()
	if err := f.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	all := f.Written()
	v.validate(all)
	f.Validated(all)
	if all := f.Written(); len(all) > 0 {
		t.Errorf("%v is told again", all)
	}
	fail(1)
	other := newTestTarget(t, space)
	df := &v.segment().Mirrors[0].Servers[0]
	if got := mustRead(t, other, df, 0, size); !bytes.Equal(got, model) {
		t.Error("what was committed and validated is not there")
	}
	for i := range df.Extents {
		e := &df.Extents[i]
		if e.State == layout.ExtentReadWrite && slices.ContainsFunc(memory.stable[e.Addr:][:e.Len], func(b byte) bool { return b >= 0x80 }) {
			t.Errorf("what was validated at %d holds what the device held before", e.Off)
		}
	}
}

package faults

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// TestOriginalsStopped: a data server is stopped with WRITEs in its sockets, and the client gives these connections up.
// When the server goes on, no such WRITE is carried out after its repetition was answered.
func TestOriginalsStopped(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true})
	originals(t, v, 4, "timeo=10", v.Servers[0].Pause, v.Servers[0].Continue)
}

// TestOriginalsFrozen: the same with WRITEs that the server carries out while its disk does not answer.
func TestOriginalsFrozen(t *testing.T) {
	disk := harness.NewDisk(t, 256<<20)
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true, Disks: []*harness.Disk{disk}})
	originals(t, v, 4, "timeo=10", disk.Freeze, disk.Thaw)
}

// originals has blocks written, each by a writer of its own, while stop has made the data server stand still. When its
// connections were lost, goOn ends that. A writer whose block was written at last writes other bytes there, and syncs.
// These have to stay.
func originals(t *testing.T, v *harness.Volume, rounds int, timeo string, stop, goOn func()) {
	const (
		writers = 256
		block   = 32 << 10 // small requests, of which many go by each connection
	)
	m := v.Mount(append(mountOptions(), timeo)...)
	f, err := os.Create(filepath.Join(m.Dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, rounds*writers*block)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	count := func(message string) int { return strings.Count(m.Log(), "connection to data server "+message) }
	want := make([]byte, rounds*writers*block)
	for round := range rounds {
		harness.Await(t, "all connections work", func() bool { return count("works again") == count("lost") })
		before := count("lost")
		stop()
		var writing sync.WaitGroup
		for w := range writers {
			i := round*writers + w
			off := i * block
			newer := want[off:][:block]
			copy(newer, bytes.Repeat(fmt.Appendf(nil, "newer %8d.", i), block))
			writing.Go(func() {
				older := bytes.Repeat([]byte("older."), block/6)
				for _, data := range [][]byte{older, newer} {
					if _, err := f.WriteAt(data, int64(off)); err != nil {
						t.Errorf("block %d: %v", i, err)
					}
				}
				if err := f.Sync(); err != nil {
					t.Errorf("block %d: %v", i, err)
				}
			})
		}
		harness.Await(t, "the connections are lost", func() bool { return count("lost") > before })
		goOn()
		writing.Wait()
	}
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	bad := 0
	for i := range rounds * writers {
		if !bytes.Equal(got[i*block:][:block], want[i*block:][:block]) {
			bad++
		}
	}
	if bad > 0 {
		t.Errorf("%d of %d blocks that were synced have older bytes", bad, rounds*writers)
	}
}

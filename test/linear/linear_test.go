package linear

import (
	"flag"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

var (
	seed     = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the first round")
	duration = flag.Duration("duration", 10*time.Second, "how long rounds are done")
)

// TestLinear has four mounts of one volume.
func TestLinear(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	var mounts []string
	for range 4 {
		mounts = append(mounts, v.Mount().Dir)
	}
	rounds := Run(t, *seed, *duration, mounts)
	t.Logf("%d rounds of %d operations", rounds, len(mounts)*each)
	if rounds == 0 {
		t.Error("nothing was done")
	}
}

// TestOneMount has four clients of one mount, which share what it keeps.
func TestOneMount(t *testing.T) {
	dir := harness.NewVolume(t, harness.Options{}).Mount().Dir
	if Run(t, *seed, *duration/4, []string{dir, dir, dir, dir}) == 0 {
		t.Error("nothing was done")
	}
}

// TestLocal shows that a local file system passes.
func TestLocal(t *testing.T) {
	dir := t.TempDir()
	if Run(t, *seed, *duration/10, []string{dir, dir, dir, dir}) == 0 {
		t.Error("nothing was done")
	}
}

// TestWrong shows that what is wrong is found.
func TestWrong(t *testing.T) {
	op := func(in input, out output, call, ret int64) porcupine.Operation {
		return porcupine.Operation{ClientId: in.client, Input: in, Output: out, Call: call, Return: ret}
	}
	create := op(input{kind: opCreate}, output{ino: 7}, 0, 10)
	for name, c := range map[string]struct {
		history []porcupine.Operation
		right   bool
	}{
		"seen":                {[]porcupine.Operation{create, op(input{kind: opStat, client: 1}, output{ino: 7}, 11, 12)}, true},
		"not yet seen":        {[]porcupine.Operation{create, op(input{kind: opStat, client: 1}, output{errno: unix.ENOENT}, 9, 12)}, true},
		"not seen":            {[]porcupine.Operation{create, op(input{kind: opStat, client: 1}, output{errno: unix.ENOENT}, 11, 12)}, false},
		"another inode":       {[]porcupine.Operation{create, op(input{kind: opStat, client: 1}, output{ino: 8}, 11, 12)}, false},
		"linked":              {[]porcupine.Operation{create, op(input{kind: opLink, ino: 7, b: 1}, output{}, 11, 20), op(input{kind: opStat, a: 1}, output{ino: 7}, 21, 22)}, true},
		"linked what is gone": {[]porcupine.Operation{create, op(input{kind: opUnlink}, output{}, 11, 12), op(input{kind: opLink, ino: 7, b: 1}, output{}, 13, 20)}, false},
		"linked with no name": {[]porcupine.Operation{create, op(input{kind: opLink, ino: 7, b: 1}, output{errno: unix.ENOENT}, 11, 12)}, false},
		"link and unlink": {[]porcupine.Operation{create, op(input{kind: opLink, ino: 7, b: 1}, output{}, 11, 12), op(input{kind: opUnlink}, output{}, 13, 14),
			op(input{kind: opLink, ino: 7, b: 2}, output{errno: unix.ENOENT}, 15, 16)}, true},
		"renamed twice":       {[]porcupine.Operation{create, op(input{kind: opRename, b: 1}, output{}, 11, 20), op(input{kind: opRename, client: 1, b: 1}, output{}, 12, 30)}, true},
		"renamed for nothing": {[]porcupine.Operation{create, op(input{kind: opRename, b: 1}, output{}, 11, 20), op(input{kind: opUnlink, a: 1}, output{}, 21, 22), op(input{kind: opRename, client: 1, b: 1}, output{}, 23, 30)}, false},
		"made twice":          {[]porcupine.Operation{create, op(input{kind: opCreate, client: 1}, output{ino: 8}, 3, 5)}, false},
		"removed twice":       {[]porcupine.Operation{create, op(input{kind: opUnlink}, output{}, 11, 20), op(input{kind: opUnlink, client: 1}, output{}, 11, 20)}, false},
		"locked twice":        {[]porcupine.Operation{op(input{kind: opLock}, output{}, 0, 5), op(input{kind: opLock, client: 1}, output{}, 6, 9)}, false},
		"locked, unlocked":    {[]porcupine.Operation{op(input{kind: opLock}, output{}, 0, 5), op(input{kind: opUnlock}, output{}, 5, 7), op(input{kind: opLock, client: 1}, output{}, 6, 9)}, true},
		"renamed to itself while a directory went and a file came": {[]porcupine.Operation{op(input{kind: opMkdir}, output{ino: 7}, 0, 1), op(input{kind: opRmdir}, output{}, 3, 4), op(input{kind: opCreate}, output{ino: 8}, 5, 6),
			op(input{kind: opRename, client: 1}, output{errno: unix.ENOTDIR}, 2, 9)}, true},
		"both names of a moved": {[]porcupine.Operation{create, op(input{kind: opRename, b: 1}, output{}, 11, 20), op(input{kind: opStat, client: 1, a: 1}, output{ino: 7}, 12, 13), op(input{kind: opStat, client: 1}, output{ino: 7}, 14, 15)}, false},
	} {
		if got := porcupine.CheckOperations(model, c.history); got != c.right {
			t.Errorf("%s: %v", name, got)
		}
	}
}

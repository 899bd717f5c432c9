package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMemoryLimit(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"nothing":     {nil, 0},
		"no limit":    {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 0},
		"unified":     {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "1048576\n"}, 1 << 20},
		"of a parent": {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "2048\n", "sys/fs/cgroup/a/memory.max": "1024\n"}, 1024},
		"container":   {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096},
		"version 1": {map[string]string{"proc/self/cgroup": "5:cpu:/\n4:hugetlb,memory:/docker/x\n0::/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n"}, 8192},
		"version 1, none": {map[string]string{"proc/self/cgroup": "4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, 0},
		"nonsense":        {map[string]string{"proc/self/cgroup": "0:\n::\n0::a\nmemory\n"}, 0},
	} {
		root := t.TempDir()
		for file, text := range c.files {
			file = filepath.Join(root, file)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := memoryLimit(root); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestFit(t *testing.T) {
	const m = 1 << 20
	for _, c := range []struct {
		limit                         int64
		given                         []string
		retain, ahead, maxWrite, heap int64
	}{
		{0, nil, 256 * m, 8 * m, 0, heapLimit},
		{4096 * m, nil, 256 * m, 8 * m, 0, heapLimit},
		{1536 * m, nil, 192 * m, 6 * m, 0, 384 * m},
		{512 * m, nil, 64 * m, 2 * m, m, 128 * m},
		{512 * m, []string{"retain=256MiB"}, 256 * m, 2 * m, m, 128 * m},
		{128 * m, nil, 16 * m, m / 2, m, 48 * m},
		{8 * m, nil, 16 * m, 64 << 10, m, 48 * m},
	} {
		o := defaultOptions()
		heap := o.fit(c.limit, c.given)
		if o.retain != c.retain || o.ahead != c.ahead || o.maxWrite != c.maxWrite || heap != c.heap {
			t.Errorf("%d MiB, %q: retain %d, readahead %d, max_write %d, heap %d, want %+v", c.limit/m, c.given, o.retain, o.ahead, o.maxWrite, heap, c)
		}
	}
}

package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// bareCommand makes this program serve the baseline: serve-bare MOUNTPOINT MAX_WRITE VALIDITY FILES
// DELAY [DIRECTORY [passthrough]].
const (
	bareCommand = "serve-bare"
	passArg     = "passthrough"
)

// bareFS is a FUSE file system that answers from memory and does nothing else: the ceiling of what any file system over
// go-fuse can reach. Its files are not freed before the end.
type bareFS struct {
	fuse.RawFileSystem
	validity time.Duration
	delay    time.Duration // of a READ, while its handler sleeps
	dir      string        // of files that hold the data; empty: it is in memory
	server   *fuse.Server  // with them, if the kernel is to read and write them; otherwise nil

	mu    sync.RWMutex
	nodes []*bareNode // index is the node id
}

type bareNode struct {
	mu       sync.RWMutex
	mode     uint32
	children map[string]uint64
	chunks   [][]byte
	size     uint64
	file     *os.File // nil: the data is in chunks
	backing  int32    // the kernel's number of file; 0: it has none
}

const bareChunk = 1 << 20

func serveBare(args []string) error {
	if len(args) < 5 || len(args) > 7 || len(args) == 7 && args[6] != passArg {
		return fmt.Errorf("%s takes MOUNTPOINT MAX_WRITE VALIDITY FILES DELAY [DIRECTORY [%s]]", bareCommand, passArg)
	}
	maxWrite, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	validity, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	files, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	delay, err := time.ParseDuration(args[4])
	if err != nil {
		return err
	}
	f := &bareFS{RawFileSystem: fuse.NewDefaultRawFileSystem(), validity: validity, delay: delay}
	if len(args) > 5 {
		f.dir = args[5]
	}
	f.nodes = []*bareNode{nil, {mode: fuse.S_IFDIR | 0o755, children: map[string]uint64{}}}
	for i := range files {
		f.add(f.nodes[1], fmt.Sprint("f", i), fuse.S_IFREG|0o644)
	}
	server, err := fuse.NewServer(f, args[0], &fuse.MountOptions{
		Name: "bare", FsName: "bare", MaxWrite: maxWrite, DisableSplice: true, DirectMountStrict: true, AllowOther: true,
		Options: []string{"default_permissions"}, MaxBackground: 65535, DisableXAttrs: true,
		ExtraCapabilities: fuse.CAP_ASYNC_DIO | fuse.CAP_DIRECT_IO_ALLOW_MMAP,
	})
	if err != nil {
		return err
	}
	if len(args) == 7 {
		f.server = server
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() { // ends with the process
		<-stop
		server.Unmount()
	}()
	server.Serve()
	return nil
}

func (f *bareFS) node(id uint64) *bareNode {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.nodes[id]
}

func (f *bareFS) add(parent *bareNode, name string, mode uint32) uint64 {
	n := &bareNode{mode: mode}
	if mode&fuse.S_IFDIR != 0 {
		n.children = map[string]uint64{}
	}
	f.mu.Lock()
	id := uint64(len(f.nodes))
	f.nodes = append(f.nodes, n)
	f.mu.Unlock()
	if f.dir != "" && mode&fuse.S_IFREG != 0 {
		n.file, _ = os.Create(filepath.Join(f.dir, fmt.Sprint("data", id))) // without it there is no data to be found
	}
	parent.mu.Lock()
	parent.children[name] = id
	parent.mu.Unlock()
	return id
}

func (f *bareFS) attr(id uint64, n *bareNode, a *fuse.Attr) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	*a = fuse.Attr{Ino: id, Mode: n.mode, Nlink: 1, Size: n.size, Blksize: 4096}
	if n.backing != 0 {
		if st, err := n.file.Stat(); err == nil {
			a.Size = uint64(st.Size())
		}
	}
}

func (f *bareFS) entry(id uint64, out *fuse.EntryOut) {
	out.NodeId = id
	out.SetEntryTimeout(f.validity)
	out.SetAttrTimeout(f.validity)
	f.attr(id, f.node(id), &out.Attr)
}

func (f *bareFS) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	n := f.node(h.NodeId)
	n.mu.RLock()
	id, ok := n.children[name]
	n.mu.RUnlock()
	if !ok {
		return fuse.ENOENT
	}
	f.entry(id, out)
	return fuse.OK
}

func (f *bareFS) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	out.SetTimeout(f.validity)
	f.attr(in.NodeId, f.node(in.NodeId), &out.Attr)
	return fuse.OK
}

func (f *bareFS) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := f.node(in.NodeId)
	if size, ok := in.GetSize(); ok {
		n.mu.Lock()
		n.size = size
		n.mu.Unlock()
	}
	out.SetTimeout(f.validity)
	f.attr(in.NodeId, n, &out.Attr)
	return fuse.OK
}

func (f *bareFS) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	f.entry(f.add(f.node(in.NodeId), name, fuse.S_IFDIR|in.Mode&0o777), out)
	return fuse.OK
}

func (f *bareFS) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	f.entry(f.add(f.node(in.NodeId), name, fuse.S_IFREG|in.Mode&0o777), &out.EntryOut)
	return f.opened(out.NodeId, &out.OpenOut)
}

func (f *bareFS) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return f.opened(in.NodeId, out)
}

func (f *bareFS) opened(id uint64, out *fuse.OpenOut) fuse.Status {
	out.OpenFlags = fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES
	n := f.node(id)
	if f.server == nil || n.file == nil {
		return fuse.OK
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.backing == 0 {
		number, errno := f.server.RegisterBackingFd(&fuse.BackingMap{Fd: int32(n.file.Fd())})
		if errno != 0 {
			return fuse.Status(errno)
		}
		n.backing = number
	}
	out.OpenFlags, out.BackingID = fuse.FOPEN_PASSTHROUGH, n.backing
	return fuse.OK
}

func (f *bareFS) remove(h *fuse.InHeader, name string) fuse.Status {
	n := f.node(h.NodeId)
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.children[name]; !ok {
		return fuse.ENOENT
	}
	delete(n.children, name)
	return fuse.OK
}

func (f *bareFS) Unlink(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return f.remove(h, name)
}

func (f *bareFS) Rmdir(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return f.remove(h, name)
}

func (f *bareFS) OpenDir(_ <-chan struct{}, _ *fuse.OpenIn, _ *fuse.OpenOut) fuse.Status {
	return fuse.OK
}

func (f *bareFS) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if f.delay > 0 {
		sleepUntil(time.Now().Add(f.delay))
	}
	n := f.node(in.NodeId)
	if n.file != nil {
		done, err := n.file.ReadAt(buf, int64(in.Offset))
		if err != nil && err != io.EOF {
			return nil, fuse.EIO
		}
		return fuse.ReadResultData(buf[:done]), fuse.OK
	}
	n.mu.RLock()
	defer n.mu.RUnlock()
	if in.Offset >= n.size {
		return fuse.ReadResultData(nil), fuse.OK
	}
	buf = buf[:min(uint64(len(buf)), n.size-in.Offset)]
	for done := 0; done < len(buf); {
		at := in.Offset + uint64(done)
		done += copy(buf[done:], n.chunks[at/bareChunk][at%bareChunk:])
	}
	return fuse.ReadResultData(buf), fuse.OK
}

func (f *bareFS) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	n := f.node(in.NodeId)
	if n.file != nil {
		if _, err := n.file.WriteAt(data, int64(in.Offset)); err != nil {
			return 0, fuse.EIO
		}
		n.mu.Lock()
		n.size = max(n.size, in.Offset+uint64(len(data)))
		n.mu.Unlock()
		return uint32(len(data)), fuse.OK
	}
	n.mu.Lock()
	for uint64(len(n.chunks))*bareChunk < in.Offset+uint64(len(data)) {
		n.chunks = append(n.chunks, make([]byte, bareChunk))
	}
	n.size = max(n.size, in.Offset+uint64(len(data)))
	chunks := n.chunks
	n.mu.Unlock()
	for done := 0; done < len(data); {
		at := in.Offset + uint64(done)
		done += copy(chunks[at/bareChunk][at%bareChunk:], data[done:])
	}
	return uint32(len(data)), fuse.OK
}

func (f *bareFS) Flush(_ <-chan struct{}, _ *fuse.FlushIn) fuse.Status { return fuse.OK }
func (f *bareFS) Fsync(_ <-chan struct{}, _ *fuse.FsyncIn) fuse.Status { return fuse.OK }
func (f *bareFS) Release(_ <-chan struct{}, _ *fuse.ReleaseIn)         {}
func (f *bareFS) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	*out = fuse.StatfsOut{Bsize: 4096, Blocks: 1 << 30, Bfree: 1 << 30, Bavail: 1 << 30, NameLen: 255}
	return fuse.OK
}

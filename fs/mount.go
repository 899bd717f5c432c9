package fs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/fs/device"
	"github.com/weftfs/weft/internal/mountinfo"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

// fsType is what the kernel calls our mounts; the part after the dot is the subtype.
const fsType = "fuse." + subtype

const subtype = "weft"

// MountConfig says how to show an FS to the kernel.
type MountConfig struct {
	Mountpoint string  // an existing directory
	Source     string  // shown by mount(8) and df(1)
	Flags      uintptr // MS_RDONLY, MS_NOSUID and others of mount(2)
	// AllowOther lets all users use a mount that is not root's; root's can always be.
	AllowOther bool
	// MaxWrite is the largest READ and WRITE, in bytes. 0 means the largest of MaxWrites that the kernel allows, or can be
	// made to allow.
	MaxWrite int
	// Transport reads requests and writes answers.
	Transport Transport
	// Memory bounds what the device loop keeps READs in, and WRITEs, in bytes each. 0 means the default of package device.
	Memory int64
}

// Transport is a way to serve the FUSE device.
type Transport int

const (
	GoFuse     Transport = iota // go-fuse's server: a goroutine for each request
	DeviceLoop                  // package device: READs and WRITEs need none
)

func (t Transport) String() string {
	return [...]string{GoFuse: "gofuse", DeviceLoop: "device"}[t]
}

// transport serves the requests of a mount.
type transport interface {
	KernelSettings() *fuse.InitIn
	// Serve returns when the mount is gone and no request is being served any more.
	Serve()
}

// MaxWrites are the request sizes that are tried. Large ones matter: the kernel sends the parts of a large read(2) or
// write(2) one after the other.
var MaxWrites = []int{8 << 20, 4 << 20, 1 << 20}

// Validate checks the configuration without touching the mount point, which may be a mount that hangs.
func (c *MountConfig) Validate() error {
	switch {
	case c.Source == "" || strings.ContainsAny(c.Source, "\n\x00"):
		return fmt.Errorf("mount: bad source %q", c.Source)
	case c.MaxWrite != 0 && (c.MaxWrite < 4096 || c.MaxWrite > MaxWrites[0] || c.MaxWrite%os.Getpagesize() != 0):
		return fmt.Errorf("mount: requests of %d bytes: want whole pages, 4096 to %d bytes", c.MaxWrite, MaxWrites[0])
	}
	return nil
}

// Server is a mount being served.
type Server struct {
	fs         *FS
	transport  transport
	kind       Transport
	mountpoint string
	minor      uint32
	maxWrite   int
	absent     bool          // the kernel expires that there is no such name
	device     *os.File      // the FUSE device, by a descriptor of our own
	gone       chan struct{} // closed when no request is being served any more
}

// rootPatience is how long Mount waits for the attributes of its root.
const rootPatience = 30 * time.Second

// Mount makes the mount and serves it until it is unmounted; an FS has one. It can be used when Mount returns. Errors
// are one line, for whoever typed the command.
func (fs *FS) Mount(cfg MountConfig) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	mountpoint, err := checkMountpoint(cfg.Mountpoint)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(fs.ctx, rootPatience)
	defer cancel()
	log := fs.log
	root, err := fs.meta.GetAttr(ctx, fs.root)
	if err != nil {
		return nil, fmt.Errorf("root of the mount: %w", err)
	}
	if root.Attr.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, fmt.Errorf("root of the mount: inode %d is not a directory", fs.root)
	}
	maxWrite := chooseMaxWrite(cfg.MaxWrite, pagesLimit, log)
	options := []string{"default_permissions", fmt.Sprintf("max_read=%d", maxWrite)}
	var device int
	if os.Geteuid() == 0 {
		device, err = mountDirect(cfg, mountpoint, append(options, "allow_other"))
	} else {
		if cfg.AllowOther {
			options = append(options, "allow_other")
		}
		device, err = mountHelper(cfg, mountpoint, options)
	}
	if err != nil {
		return nil, err
	}
	release := kernelRelease()
	s := &Server{
		fs: fs, kind: cfg.Transport, mountpoint: mountpoint, maxWrite: maxWrite,
		absent: expiresAbsent(release), gone: make(chan struct{}),
	}
	if own, dupErr := unix.FcntlInt(uintptr(device), unix.F_DUPFD_CLOEXEC, 3); dupErr != nil {
		err = dupErr
		unix.Close(device)
	} else {
		s.device = os.NewFile(uintptr(own), "/dev/fuse") // still a blocking one, so Go's poller does not watch it
		// The transport takes over the descriptor and answers the kernel's INIT.
		s.transport, err = fs.newTransport(cfg, device, maxWrite)
		if err != nil {
			s.device.Close()
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mount %s: %w", mountpoint, err), detach(mountpoint))
	}
	fs.disconnected = s.disconnected
	told := kernel(s)
	fs.kernel.Store(&told)
	offered := s.transport.KernelSettings().Flags64()
	for _, c := range capabilities {
		if offered&c.flag == 0 {
			log.Warn("this kernel lacks something: "+c.lack, "capability", c.name)
		}
	}
	if !s.absent {
		log.Warn("this kernel lacks something: names that are not there are asked for at each use; Linux 7.1 has it", "release", release)
	}
	entry, err := findMount(mountpoint)
	if err != nil {
		s.device.Close()
		return nil, errors.Join(err, detach(mountpoint))
	}
	s.minor = unix.Minor(entry.Dev)
	// The goroutine answers the kernel and ends when the mount is gone.
	go func() {
		s.transport.Serve()
		s.device.Close()
		close(s.gone)
	}()
	return s, nil
}

// newTransport makes what serves the FUSE device.
func (fs *FS) newTransport(cfg MountConfig, fd, maxWrite int) (transport, error) {
	log := fs.log
	options := &fuse.MountOptions{
		Name:          subtype,
		FsName:        cfg.Source,
		MaxWrite:      maxWrite,
		MaxBackground: 65535, // data servers are bounded one by one, so that a dead one does not stop the others
		EnableLocks:   true,  // they hold between mounts
		DisableSplice: true,  // data comes from sockets
		Logger:        slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		PanicHandler: func(v any) fuse.Status {
			log.Error("a request handler failed; this is a bug", "panic", v, "stack", string(debug.Stack()))
			return fuse.EIO
		},
		ExtraCapabilities:  wantedCapabilities(),
		DisableReadDirPlus: true,
		MaxStackDepth:      1, // of the data servers' file systems; more would keep overlayfs from being on top of us
	}
	if fs.pass.mode == PassNone {
		options.DisabledCapabilities = fuse.CAP_PASSTHROUGH
	}
	if cfg.Transport == GoFuse {
		return fuse.NewServer(fs.RawFileSystem(), "/dev/fd/"+strconv.Itoa(fd), options)
	}
	return device.New(device.Config{
		FD: fd, FileSystem: fs.RawFileSystem(), Options: options, Handler: transfers{fs}, Memory: cfg.Memory, Log: log,
	})
}

// capabilities are asked of the kernel beside those that go-fuse asks for.
var capabilities = []struct {
	flag uint64
	name string
	lack string // what is worse without
}{
	{fuse.CAP_ASYNC_DIO, "ASYNC_DIO", "asynchronous I/O of programs is carried out one request at a time"},
	{fuse.CAP_DIRECT_IO_ALLOW_MMAP, "DIRECT_IO_ALLOW_MMAP", "shared mappings (mmap with MAP_SHARED) fail with ENODEV; Linux 6.6 has it"},
	{fuse.CAP_HANDLE_KILLPRIV_V2, "HANDLE_KILLPRIV_V2", "each write asks for an extended attribute first; Linux 5.11 has it"},
	{fuse.CAP_HAS_EXPIRE_ONLY, "HAS_EXPIRE_ONLY", "names are asked for at each use; Linux 6.2 has it"},
	{fuse.CAP_POSIX_ACL, "POSIX_ACL", "access control lists are checked by the service alone; Linux 4.9 has it"},
	{fuse.CAP_DONT_MASK, "DONT_MASK", "files made where a default access control list is lose what the umask takes"},
	{fuse.CAP_EXPORT_SUPPORT, "EXPORT_SUPPORT", "file handles are good only as long as the kernel keeps the inode"},
	{fuse.CAP_ATOMIC_O_TRUNC, "ATOMIC_O_TRUNC", "truncation by open takes two requests"},
}

func wantedCapabilities() (flags uint64) {
	for _, c := range capabilities {
		flags |= c.flag
	}
	return flags
}

// Wait returns when the mount is gone, however that came about, and all requests have been answered.
func (s *Server) Wait() { <-s.gone }

// Transport is what serves the mount.
func (s *Server) Transport() Transport { return s.kind }

// MaxWrite is the largest request, in bytes.
func (s *Server) MaxWrite() int { return s.maxWrite }

// ControlID is the number of the FUSE connection: the minor device number of the mount's files, and its name in
// /sys/fs/fuse/connections.
func (s *Server) ControlID() uint32 { return s.minor }

// disconnected reports whether the kernel has given up the mount: it was unmounted, or the connection aborted.
func (s *Server) disconnected() bool {
	conn, err := s.device.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = conn.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd)}}
		n, err := unix.Poll(poll, 0)
		gone = err == nil && n == 1 && poll[0].Revents&(unix.POLLERR|unix.POLLNVAL) != 0
	})
	return gone || err != nil
}

// Unmount takes the mount away. One that programs use is EBUSY.
func (s *Server) Unmount() error { return unmount(s.mountpoint, 0) }

// detach takes away a mount that could not be brought to work.
func detach(mountpoint string) error { return unmount(mountpoint, unix.MNT_DETACH) }

func unmount(mountpoint string, flags int) error {
	if os.Geteuid() == 0 {
		if err := unix.Unmount(mountpoint, unix.UMOUNT_NOFOLLOW|flags); err != nil {
			return fmt.Errorf("unmount %s: %w", mountpoint, err)
		}
		return nil
	}
	args := []string{"-u", "--", mountpoint}
	if flags&unix.MNT_DETACH != 0 {
		args = slices.Insert(args, 1, "-z")
	}
	if out, err := exec.Command(helper, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("unmount %s: %s", mountpoint, helperError(out, err))
	}
	return nil
}

// oldPagesLimit is what was fixed before Linux 6.13.
const oldPagesLimit = 256

const pagesLimitFile = "/proc/sys/fs/fuse/max_pages_limit"

// pagesLimit reads the kernel's bound on the pages of one request or, if set is not 0, raises it for the whole machine.
func pagesLimit(set int) (int, error) {
	if set != 0 {
		if err := os.WriteFile(pagesLimitFile, []byte(strconv.Itoa(set)), 0); err != nil {
			return 0, err
		}
	}
	b, err := os.ReadFile(pagesLimitFile)
	if errors.Is(err, os.ErrNotExist) {
		return oldPagesLimit, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// chooseMaxWrite is the wanted request size, or if that is 0 the largest of MaxWrites, or as much of it as the kernel
// allows or, with the rights, can be made to allow.
func chooseMaxWrite(wanted int, limit func(set int) (int, error), log *slog.Logger) int {
	page := os.Getpagesize()
	sizes := MaxWrites
	if wanted != 0 {
		sizes = append([]int{wanted}, sizes...)
	}
	pages, err := limit(0)
	if err != nil {
		log.Warn("the kernel's limit on the size of requests is not known", "err", err)
		pages = oldPagesLimit
	}
	if want := sizes[0] / page; pages < want {
		log := log.With("sysctl", pagesLimitFile, "pages", pages, "wanted", want)
		if os.Geteuid() != 0 {
			log.Info("the kernel does not allow requests as large as would be good")
		} else if _, err := limit(want); err != nil {
			log.Warn("the kernel does not allow requests as large as would be good", "err", err)
		} else {
			log.Info("raised the kernel's limit on the size of requests, for all FUSE mounts")
			pages = want
		}
	}
	for _, n := range sizes {
		if n <= pages*page {
			return n
		}
	}
	return max(pages, 1) * page
}

// checkMountpoint resolves the mount point, or says what is wrong with it.
func checkMountpoint(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("mount point %s: %w", path, err)
	}
	// The last element may be a mount that does not answer.
	if dir, err := filepath.EvalSymlinks(filepath.Dir(abs)); err == nil {
		abs = filepath.Join(dir, filepath.Base(abs))
	}
	if m, err := findMount(abs); err == nil && m.Type == fsType {
		return "", fmt.Errorf("mount point %s is already a weft mount of %s", abs, m.Source)
	}
	var st unix.Stat_t
	switch err := unix.Stat(abs, &st); {
	case errors.Is(err, unix.ENOENT):
		return "", fmt.Errorf("mount point %s does not exist", abs)
	case errors.Is(err, unix.ENOTCONN):
		return "", fmt.Errorf("mount point %s is a mount whose serving process has died; free it with umount -l", abs)
	case err != nil:
		return "", fmt.Errorf("mount point %s: %w", abs, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return "", fmt.Errorf("mount point %s is not a directory", abs)
	}
	return filepath.EvalSymlinks(abs)
}

// findMount finds the topmost mount on a directory, without touching that.
func findMount(mountpoint string) (mountinfo.Mount, error) {
	all, err := mountinfo.Read("self")
	if err != nil {
		return mountinfo.Mount{}, err
	}
	m, ok := mountinfo.At(all, mountpoint)
	if !ok {
		return m, fmt.Errorf("nothing is mounted on %s", mountpoint)
	}
	return m, nil
}

// mountDirect mounts as root does. go-fuse could, but knows fewer flags and leaks the descriptor to child processes.
func mountDirect(cfg MountConfig, mountpoint string, options []string) (int, error) {
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return -1, fmt.Errorf("no /dev/fuse (%w): load the module with modprobe fuse, or give the container the device", err)
	case err != nil:
		return -1, fmt.Errorf("/dev/fuse: %w", err)
	}
	options = append(options,
		"fd="+strconv.Itoa(device), fmt.Sprintf("rootmode=%o", unix.S_IFDIR), "user_id=0", "group_id=0")
	err = unix.Mount(cfg.Source, mountpoint, fsType, cfg.Flags, strings.Join(options, ","))
	if err != nil {
		unix.Close(device)
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w: mounting needs CAP_SYS_ADMIN, which this container or service does not have", err)
		}
		return -1, fmt.Errorf("mount %s: %w", mountpoint, err)
	}
	return device, nil
}

// helper mounts and unmounts for those who are not root.
const helper = "fusermount3"

func helperError(out []byte, err error) string {
	if said := strings.TrimSpace(string(out)); said != "" {
		return strings.ReplaceAll(said, "\n", "; ")
	}
	return fmt.Sprintf("%s: %v", helper, err)
}

// flagOptions are the flags of mount(2) that the helper takes, as options.
var flagOptions = []struct {
	flag uintptr
	name string
}{
	{unix.MS_RDONLY, "ro"},
	{unix.MS_NOSUID, "nosuid"},
	{unix.MS_NODEV, "nodev"},
	{unix.MS_NOEXEC, "noexec"},
	{unix.MS_SYNCHRONOUS, "sync"},
	{unix.MS_DIRSYNC, "dirsync"},
	{unix.MS_NOATIME, "noatime"},
	{unix.MS_NODIRATIME, "nodiratime"},
}

// mountHelper lets fusermount3 mount, which always adds nosuid and nodev, and receives the descriptor from it.
func mountHelper(cfg MountConfig, mountpoint string, options []string) (int, error) {
	if _, err := os.Stat("/dev/fuse"); err != nil {
		return -1, fmt.Errorf("no /dev/fuse (%w): the administrator has to load the module fuse", err)
	}
	path, err := exec.LookPath(helper)
	if err != nil {
		return -1, fmt.Errorf("mounting without being root needs %s, of the package fuse3: %w", helper, err)
	}
	quote := strings.NewReplacer(`\`, `\\`, `,`, `\,`)
	options = append(options, "fsname="+quote.Replace(cfg.Source), "subtype="+subtype)
	for _, f := range flagOptions {
		if cfg.Flags&f.flag != 0 {
			options = append(options, f.name)
		}
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket pair for %s: %w", helper, err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	cmd := exec.Command(path, "-o", strings.Join(options, ","), "--", mountpoint)
	cmd.Env = append(os.Environ(), "_FUSE_COMMFD=3")
	cmd.ExtraFiles = []*os.File{theirs}
	out, err := cmd.CombinedOutput()
	theirs.Close()
	if err != nil {
		return -1, fmt.Errorf("mount %s: %s", mountpoint, helperError(out, err))
	}
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(pair[0], make([]byte, 8), control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("%s did not hand over the mount: %w", helper, err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		return -1, fmt.Errorf("%s did not hand over the mount: %d messages, %v", helper, len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, fmt.Errorf("%s did not hand over the mount: %d descriptors, %v", helper, len(fds), err)
	}
	return fds[0], nil
}

// Remounted takes over the rules that a remount has changed: which accesses change times, and which copies of files that have several
// the kernel may read by itself. Before a mount may be written to, copies must not be PinAny any more.
func (fs *FS) Remounted(atime Atime, copies metarpc.Pin) {
	fs.accesses.rule.Store(&atime)
	fs.pass.copies.Store(uint32(copies))
}

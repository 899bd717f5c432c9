package fs

import (
	"bytes"
	"io"
	"os"
	"strconv"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// cred is on whose behalf the kernel asks. A request has the caller's user and group, but of his supplementary groups
// at most one, so they are read from /proc each time: some 15 us, and setgroups(2) has effect at once. Where that
// does not work the service knows the groups of the user. Those of root decide nothing.
func cred(h *fuse.InHeader) metarpc.Cred {
	who := metarpc.Cred{UID: h.Uid, GID: h.Gid}
	if who.UID != 0 {
		var visible bool
		who.Groups, visible = groupsOf(h.Pid, h.Uid)
		who.ByUID = !visible
	}
	return who
}

// userOnly is cred for what the service allows everybody.
func userOnly(h *fuse.InHeader) metarpc.Cred { return metarpc.Cred{UID: h.Uid, GID: h.Gid} }

var statusBuffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// groupsOf reads the supplementary groups of the thread pid (proc(5), status). It fails if the thread cannot be seen from
// here, because of its process namespace or of hidepid, or if it is not one of uid: then it acts for somebody else.
func groupsOf(pid, uid uint32) (groups []uint32, visible bool) {
	readStatus(pid, func(status []byte) { groups, visible = parseGroups(status, uid) })
	return groups, visible
}

// readStatus calls f with the status of a thread, if it can be read.
func readStatus(pid uint32, f func(status []byte)) {
	if pid == 0 {
		return
	}
	file, err := os.Open("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/status")
	if err != nil {
		return
	}
	defer file.Close()
	b := statusBuffers.Get().(*bytes.Buffer)
	defer statusBuffers.Put(b)
	b.Reset()
	if _, err := b.ReadFrom(io.LimitReader(file, maxStatus)); err == nil {
		f(b.Bytes())
	}
}

// processOf is the process of a thread, which is what the kernel calls a pid in a request; the thread itself if that cannot be seen.
func processOf(pid uint32) uint32 {
	process := pid
	readStatus(pid, func(status []byte) {
		for line := range bytes.Lines(status) {
			if value, ok := bytes.CutPrefix(line, []byte("Tgid:")); ok {
				if n, err := strconv.ParseUint(string(bytes.TrimSpace(value)), 10, 32); err == nil {
					process = uint32(n)
				}
				return
			}
		}
	})
	return process
}

// maxStatus is more than a status with all groups that there can be.
const maxStatus = 1 << 20

// parseGroups finds the groups in the text of a status whose file system user is uid.
func parseGroups(status []byte, uid uint32) (groups []uint32, ok bool) {
	mine := false
	for line := range bytes.Lines(status) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch string(name) {
		case "Uid": // real, effective, saved, of file systems
			fields := bytes.Fields(value)
			mine = len(fields) == 4 && string(fields[3]) == strconv.FormatUint(uint64(uid), 10)
		case "Groups":
			for field := range bytes.FieldsSeq(value) {
				gid, err := strconv.ParseUint(string(field), 10, 32)
				if err != nil {
					return nil, false
				}
				groups = append(groups, uint32(gid))
			}
			return groups, mine
		}
	}
	return nil, false
}

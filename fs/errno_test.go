package fs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
)

func TestErrno(t *testing.T) {
	status := func(s metarpc.Status) error { return &metarpc.Error{Op: metarpc.OpLookup, Status: s} }
	for _, c := range []struct {
		err    error
		want   syscall.Errno
		logged bool
	}{
		{nil, 0, false},
		{syscall.ENOTEMPTY, syscall.ENOTEMPTY, false},
		{fmt.Errorf("deep: %w", status(metarpc.Status(syscall.ENOSPC))), syscall.ENOSPC, false},
		{fmt.Errorf("left: %w", context.Canceled), syscall.EINTR, false},
		{byID(7, status(metarpc.Status(syscall.ENOENT))), syscall.ESTALE, false},
		{byID(7, status(metarpc.Status(syscall.EROFS))), syscall.EROFS, false},
		{byID(7, nil), 0, false},
		{status(metarpc.StatusShutdown), syscall.EIO, true},
		{status(metarpc.StatusInternal), syscall.EIO, true},
		{status(99999), syscall.EIO, true},
		{fmt.Errorf("outer: %w", io.ErrUnexpectedEOF), syscall.EIO, true},
		{errors.Join(errors.New("one"), syscall.EDQUOT), syscall.EDQUOT, false},
		{&net.OpError{Op: "read", Err: os.NewSyscallError("recvmsg", syscall.ENOTCONN)}, syscall.EIO, true},
		{fmt.Errorf("dial: %w", syscall.ECONNREFUSED), syscall.EIO, true},
		{status(metarpc.Status(syscall.ENOTCONN)), syscall.EIO, true},
	} {
		var log bytes.Buffer
		fs := &FS{log: slog.New(slog.NewTextHandler(&log, nil))}
		if got := fs.errno(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
		if logged := log.Len() > 0; logged != c.logged || logged && !strings.Contains(log.String(), c.err.Error()) {
			t.Errorf("%v: logged %q", c.err, log.String())
		}
	}
	var log bytes.Buffer
	fs := &FS{log: slog.New(slog.NewTextHandler(&log, nil))}
	for range 1000 {
		fs.errno(io.EOF)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 || fs.failing.left.Load() != 999 {
		t.Errorf("1000 errors make %d lines", n)
	}
}

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		err   error
		want  verdict
		errno syscall.Errno
	}{
		{nfs3.ErrStale, refetch, syscall.EIO},
		{nfs3.ErrBadHandle, refetch, syscall.EIO},
		{nfs3.ErrAcces, refetch, syscall.EIO},
		{nfs3.ErrPerm, refetch, syscall.EIO},
		{fmt.Errorf("device: %w", nfs3.ErrNoSpc), fail, syscall.ENOSPC},
		{nfs3.ErrDQuot, fail, syscall.EDQUOT},
		{nfs3.ErrFBig, fail, syscall.EFBIG},
		{nfs3.ErrROFS, fail, syscall.EROFS},
		{nfs3.ErrIO, fail, syscall.EIO},
		{nfs3.ErrServerFault, fail, syscall.EIO},
		{nfs3.Status(4711), fail, syscall.EIO},
		{io.EOF, fail, syscall.EIO},
		{errors.Join(io.EOF, nfs3.ErrStale), refetch, syscall.EIO},
		{context.Canceled, fail, syscall.EINTR},
		{&metarpc.Error{Status: metarpc.StatusLayoutUnavailable}, wait, syscall.EIO},
		{&metarpc.Error{Status: metarpc.StatusShutdown}, wait, syscall.EIO},
		{&metarpc.Error{Status: metarpc.Status(syscall.ENOSPC)}, fail, syscall.ENOSPC},
		{&metarpc.Error{Status: metarpc.StatusInternal}, fail, syscall.EIO},
		{byID(1, &metarpc.Error{Status: metarpc.Status(syscall.ENOENT)}), fail, syscall.ESTALE},
	} {
		if got, errno := classify(c.err); got != c.want || errno != c.errno {
			t.Errorf("%v: %v, %v; want %v, %v", c.err, got, errno, c.want, c.errno)
		}
	}
}

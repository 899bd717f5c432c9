package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/pkg/xattr"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/metaclient"
)

// usageXattr is what is below a directory.
const usageXattr = "weft.usage"

// quotaTarget is the part of the command line that says whose quota is meant.
type quotaTarget struct {
	server      *service
	user, group *string
}

func quotaFlags(fl *pflag.FlagSet) quotaTarget {
	return quotaTarget{
		user:   fl.String("user", "", "what belongs to this user, a name or a number"),
		group:  fl.String("group", "", "what belongs to this group, a name or a number"),
		server: serviceFlag(fl),
	}
}

// name is whose quota is meant, and the service to ask if --server does not say it: that of the directory's mount.
func (t quotaTarget) name(c *command, fl *pflag.FlagSet) (name metarpc.QuotaName, server *service, err error) {
	server = t.server
	given := fl.NArg()
	for _, who := range []string{*t.user, *t.group} {
		if who != "" {
			given++
		}
	}
	if given != 1 {
		return name, nil, usagef("%s: name one directory, --user or --group; usage: weft %s %s", c.Name, c.Name, c.Args)
	}
	switch {
	case *t.user != "":
		id, err := lookUpID(*t.user, func(s string) (string, error) {
			u, err := user.Lookup(s)
			if err != nil {
				return "", err
			}
			return u.Uid, nil
		})
		return metarpc.QuotaName{Kind: metarpc.QuotaUser, ID: id}, server, err
	case *t.group != "":
		id, err := lookUpID(*t.group, func(s string) (string, error) {
			g, err := user.LookupGroup(s)
			if err != nil {
				return "", err
			}
			return g.Gid, nil
		})
		return metarpc.QuotaName{Kind: metarpc.QuotaGroup, ID: id}, server, err
	}
	path := fl.Arg(0)
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return name, nil, fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return name, nil, fmt.Errorf("%s: not a directory; a quota is for all that is below one", filename.Quote(path))
	}
	m, err := mountOf(st.Dev)
	if err != nil {
		return name, nil, fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	if server.hosts == "" {
		s, err := parseSource(m.Source)
		if err != nil {
			return name, nil, err
		}
		server.hosts = strings.Join(s.addrs, ",")
	}
	return metarpc.QuotaName{Kind: metarpc.QuotaTree, ID: st.Ino}, server, nil
}

// lookUpID is the number of a user or group, who need not exist here if it is given as a number.
func lookUpID(s string, find func(string) (string, error)) (uint64, error) {
	number := s
	if _, err := strconv.ParseUint(s, 10, 32); err != nil {
		if number, err = find(s); err != nil {
			return 0, usagef("%v", err)
		}
	}
	id, err := strconv.ParseUint(number, 10, 32)
	if err != nil || id == 1<<32-1 {
		return 0, usagef("%q is no user or group", s)
	}
	return id, nil
}

func runQuotaSet(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nA limit of 0 is none, and what is not given stays as it is; without limits there is no quota any more. It holds for root as well. Bytes are those\n" +
		"that files are long, files those of any kind, directories too. What is there already stays, however much it is.\n")
	size := fl.String("bytes", "", "how many bytes, such as 10GiB")
	files := fl.Int64("files", metarpc.QuotaKeep, "how many files and directories")
	target := quotaFlags(fl)
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	bytes := int64(metarpc.QuotaKeep)
	if *size != "" {
		n, err := humanize.ParseBytes(*size)
		if err != nil || n > 1<<62 {
			return usagef("%s: --bytes %q is not a size such as 10GiB", c.Name, *size)
		}
		bytes = int64(n)
	}
	if fl.Changed("files") && *files < 0 {
		return usagef("%s: --files %d: want 0 or more", c.Name, *files)
	}
	if bytes < 0 && *files < 0 {
		return usagef("%s: nothing to set; give --bytes or --files", c.Name)
	}
	name, server, err := target.name(c, fl)
	if err != nil {
		return err
	}
	return withService(ctx, server, c.Name, func(ctx context.Context, mc *metaclient.Volume) error {
		return mc.SetQuota(ctx, name, bytes, *files)
	})
}

func runQuotaGet(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	asJSON := fl.Bool("json", false, "print an array of objects")
	target := quotaFlags(fl)
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	name, server, err := target.name(c, fl)
	if err != nil {
		return err
	}
	return withService(ctx, server, c.Name, func(ctx context.Context, mc *metaclient.Volume) error {
		info, err := mc.Quota(ctx, name)
		if err != nil {
			return err
		}
		return printQuotas([]metarpc.QuotaInfo{info}, *asJSON)
	})
}

func runQuotaList(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	asJSON := fl.Bool("json", false, "print an array of objects")
	server := serviceFlag(fl)
	if err := parse(c, fl, args, 0, 0); err != nil {
		return err
	}
	return withService(ctx, server, c.Name, func(ctx context.Context, mc *metaclient.Volume) error {
		infos, err := mc.Quotas(ctx)
		if err != nil {
			return err
		}
		return printQuotas(infos, *asJSON)
	})
}

// quotaStatus is the form of `weft admin quota ls --json`.
type quotaStatus struct {
	Kind      string        `json:"kind"` // tree, user or group
	ID        uint64        `json:"id"`   // of the directory, the user or the group
	Name      filename.JSON `json:"name"` // the directory's path in the volume, or the name on this host; empty if there is none
	Bytes     int64         `json:"bytes"`
	Files     int64         `json:"files"` // limits; 0: none
	UsedBytes int64         `json:"used_bytes"`
	UsedFiles int64         `json:"used_files"`
}

func quotaStatusOf(info metarpc.QuotaInfo) quotaStatus {
	q := quotaStatus{Kind: "tree", ID: info.Name.ID, Name: filename.JSON(info.Path), Bytes: info.Bytes, Files: info.Files, UsedBytes: info.UsedBytes, UsedFiles: info.UsedFiles}
	switch id := strconv.FormatUint(info.Name.ID, 10); info.Name.Kind {
	case metarpc.QuotaUser:
		q.Kind = "user"
		if u, err := user.LookupId(id); err == nil {
			q.Name = filename.JSON(u.Username)
		}
	case metarpc.QuotaGroup:
		q.Kind = "group"
		if g, err := user.LookupGroupId(id); err == nil {
			q.Name = filename.JSON(g.Name)
		}
	}
	return q
}

func printQuotas(infos []metarpc.QuotaInfo, asJSON bool) error {
	list := []quotaStatus{}
	for _, info := range infos {
		list = append(list, quotaStatusOf(info))
	}
	limit := func(n int64, format func(uint64) string) string {
		if n == 0 {
			return "-"
		}
		return format(uint64(n))
	}
	plain := func(n uint64) string { return strconv.FormatUint(n, 10) }
	return printList(list, asJSON, "no quotas; set one with: weft admin quota set DIR --bytes SIZE", func(w io.Writer) {
		fmt.Fprintln(w, "OF\tBYTES\tLIMIT\tFILES\tLIMIT")
		for _, q := range list {
			name := plain(q.ID)
			if q.Name != "" {
				name = filename.Quote(string(q.Name))
			}
			fmt.Fprintf(w, "%s %s\t%s\t%s\t%d\t%s\n", q.Kind, name, humanize.IBytes(uint64(max(q.UsedBytes, 0))), limit(q.Bytes, humanize.IBytes), q.UsedFiles, limit(q.Files, plain))
		}
	})
}

// dirUsage is the form of `weft du --json`.
type dirUsage struct {
	Path  filename.JSON `json:"path"`
	Bytes int64         `json:"bytes"`
	Files int64         `json:"files"`
	Dirs  int64         `json:"dirs"`
}

func runDu(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nNothing is walked: directories know what is below them. Bytes are those that files are long. A file with several names is counted once, where\n" +
		"it was made, or moved to since. What this mount has written is made stable first, if you may ask it to, and counted. What other clients have\n" +
		"written and not yet made stable is not counted.\n")
	asJSON := fl.Bool("json", false, "print an array of objects")
	exact := fl.BoolP("bytes", "b", false, "print exact bytes")
	const many = 1 << 20
	if err := parse(c, fl, args, 1, many); err != nil {
		return err
	}
	list := []dirUsage{}
	synced := map[uint64]bool{} // mounts, by st_dev
	for _, path := range fl.Args() {
		tellSizes(ctx, path, synced)
		value, err := xattr.Get(path, usageXattr)
		if errors.Is(errnoOf(err), unix.ENODATA) {
			return fmt.Errorf("%s: not a directory", filename.Quote(path))
		}
		if err != nil {
			return notWeft(path, err)
		}
		u := dirUsage{Path: filename.JSON(path)}
		if _, err := fmt.Sscanf(string(value), "bytes=%d files=%d dirs=%d", &u.Bytes, &u.Files, &u.Dirs); err != nil {
			return fmt.Errorf("%s: attribute %s is %q", filename.Quote(path), usageXattr, value)
		}
		list = append(list, u)
	}
	return printList(list, *asJSON, "", func(w io.Writer) {
		for _, u := range list {
			size := humanize.IBytes(uint64(max(u.Bytes, 0)))
			if *exact {
				size = strconv.FormatInt(u.Bytes, 10)
			}
			fmt.Fprintf(w, "%s\t%d files\t%d directories\t%s\n", size, u.Files, u.Dirs, filename.Quote(string(u.Path)))
		}
	})
}

// tellSizes has the mount of path make stable what it has written: the service counts what is. It does nothing for a
// mount that was dealt with, or that is not the caller's.
func tellSizes(ctx context.Context, path string, done map[uint64]bool) {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || done[st.Dev] {
		return // who asks for its usage gets the error
	}
	done[st.Dev] = true
	m, err := mountOf(st.Dev)
	if err != nil || os.Getuid() != 0 && os.Getuid() != m.Owner {
		return
	}
	if err := control(ctx, m, controlRequest{Op: "sync", Reachable: true}, &struct{}{}); err != nil {
		fmt.Fprintf(os.Stderr, "weft: what was written last may not be counted: %s\n", filename.OneLine(err))
	}
}

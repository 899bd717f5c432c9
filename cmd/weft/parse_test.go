package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/mountinfo"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

func TestParseSource(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"host:/", "host:7049:/"},
		{"host:/a//b/", "host:7049:/a/b"},
		{"host:/../a/./b", "host:7049:/a/b"},
		{"host:1:/", "host:1:/"},
		{"host:065535:/", "host:65535:/"},
		{"10.0.0.1,b:7,[::1],[fe80::1%eth0]:9:/x", "10.0.0.1:7049,b:7,[::1]:7049,[fe80::1%eth0]:9:/x"},
		{"host:/a:/b", "host:7049:/a:/b"},
		{"host:/with space,and comma", "host:7049:/with space,and comma"},
	} {
		s, err := parseSource(c.in)
		if err != nil || s.String() != c.want {
			t.Errorf("%q: %q, %v; want %q", c.in, s, err, c.want)
		}
	}
	for in, word := range map[string]string{
		"":             "HOST[:PORT]:/",
		"host":         "HOST[:PORT]:/",
		"host:dir":     "HOST[:PORT]:/",
		":/":           "no host",
		"a,,b:/":       "no host",
		":7049:/":      "no host",
		"[]:/":         "no host",
		"host::/":      "not a port",
		"host:0:/":     "not a port",
		"host:65536:/": "not a port",
		"host:+1:/":    "not a port",
		"host:nfs:/":   "not a port",
		"::1:/":        "brackets",
		"[host:/":      "not a host",
		"a b:/":        "not a host",
		"a/b:/":        "not a host",
	} {
		if s, err := parseSource(in); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %q, error %v does not say %q", in, s, err, word)
		}
	}
}

// FuzzParseSource: what is accepted is accepted again in its canonical form, and means the same.
func FuzzParseSource(f *testing.F) {
	for _, s := range []string{"host:/", "a:1,[::1]:2,[fe80::1%eth0]:/x/../y", "[a]:/", "[[a]]:1:/", ":/", "h:/:/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		s, err := parseSource(in)
		if err != nil {
			return
		}
		if !strings.HasPrefix(s.dir, "/") || len(s.addrs) == 0 {
			t.Fatalf("%q: %+v", in, s)
		}
		again, err := parseSource(s.String())
		if err != nil || !reflect.DeepEqual(again, s) {
			t.Fatalf("%q: %+v, read back %+v, %v", in, s, again, err)
		}
	})
}

func TestParseOptions(t *testing.T) {
	with := func(change func(o *mountOptions)) mountOptions {
		o := defaultOptions()
		change(&o)
		return o
	}
	for _, c := range []struct {
		lists []string
		want  mountOptions
	}{
		{nil, defaultOptions()},
		{[]string{"", ",", "_netdev,defaults"}, defaultOptions()},
		{[]string{"ro,nosuid,nodev", "noexec"}, with(func(o *mountOptions) {
			o.flags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
		})},
		{[]string{"strictatime,nodiratime", "noatime"}, with(func(o *mountOptions) { o.flags = unix.MS_NOATIME | unix.MS_NODIRATIME })},
		{[]string{"noatime,strictatime"}, with(func(o *mountOptions) { o.flags = unix.MS_STRICTATIME })},
		{[]string{"nodiratime,strictatime,diratime,relatime"}, with(func(o *mountOptions) { o.flags = 0 })},
		{[]string{"ro,nosuid", "rw"}, with(func(o *mountOptions) { o.flags = unix.MS_NOSUID })},
		{[]string{"ro,defaults"}, defaultOptions()},
		{[]string{"nconnect=16,rsize=4MiB,wsize=4096,max_write=1MiB,retain=1GiB,readahead=0,mirror-timeout=30s,cache=lease,close=stable,localio=ro,passthrough=off,nvme-policy=queue-depth,nvme-keepalive=1500ms,nvme-hostnqn=nqn.2026-01.org.example:a,nvme-discovery=d1+[fe80::1%eth0]+10.0.0.2:8010,nvme-secretfile=/s,log=/a=b,log-format=json,metrics=:9101,pprof,hard,softerr,timeo=50,retrans=1,noresvport,xprtsec=mtls,data_xprtsec=tls,tls_dir=/d,tls_ca=/ca,tls_cert=/c,tls_key=/k,tls_crl=/r"}, mountOptions{
			nconnect: 16, rsize: 4 << 20, wsize: 4 << 10, maxWrite: 1 << 20, retain: 1 << 30, mirror: 30 * time.Second, cache: cacheLease, stable: true, local: localRO, policy: nvmetcp.QueueDepth, kato: 1500 * time.Millisecond, secrets: "/s", hostNQN: "nqn.2026-01.org.example:a", log: "/a=b", logJSON: true, metrics: ":9101", profile: true,
			discovery: []string{"d1:8009", "[fe80::1%eth0]:8009", "10.0.0.2:8010"},
			soft:      syscall.ETIMEDOUT, timeo: 5 * time.Second, retrans: 1,
			retry: -1, anyPort: true, secrecy: secrecy{policy: rpctls.Mutual, data: rpctls.TLS, dir: "/d", files: rpctls.Files{CA: "/ca", Cert: "/c", Key: "/k", CRL: "/r"}},
		}},
		{[]string{"user_id=0,group_id=0,max_read=1048576,default_permissions,allow_other,x-systemd.automount,nofail,user=anna,users,comment=a=b,remount,bg,retry=5"}, with(func(o *mountOptions) {
			o.remount, o.background, o.retry, o.forAll = true, true, 5*time.Minute, true
		})},
		{[]string{"local-export=ds1:/a=/srv/a,local-export=[fe80::7]:2049:/b/=/srv/b=c/", "local-export=10.0.0.1:/=/srv"}, with(func(o *mountOptions) {
			o.exports = []localExport{{"ds1", "", "/a", "/srv/a"}, {"fe80::7", "2049", "/b", "/srv/b=c"}, {"10.0.0.1", "", "/", "/srv"}}
		})},
	} {
		if got, err := parseOptions(c.lists); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %+v, %v; want %+v", c.lists, got, err, c.want)
		}
	}
	for in, word := range map[string]string{
		"nconect=4":         `"nconnect"`,
		"ROO":               "did you mean",
		"ro=1":              "takes no value",
		"rsize":             "rsize=SIZE",
		"nconnect=":         "1 to 16",
		"nconnect=17":       "1 to 16",
		"timeo=0":           "1 to 6000",
		"retrans=-1":        "0 to 1000",
		"soft=1":            "no value",
		"rsize=1KiB":        "4.0 KiB to 4.0 MiB",
		"retain=-1":         "want a size",
		"log=":              "want a file",
		"cache=all":         "want none or lease",
		"readahead=1K":      "want a size from 64KiB to 1GiB, or 0",
		"close=":            "want written or stable",
		"mirror-timeout=0s": "1s to 1h",
		"mirror-timeout=0":  "1s to 1h",
		"mirror-timeout=1":  "a time has a unit: 1s, or 1ms",
		"mirror-timeout=1x": "a number and a unit",
		"nvme-keepalive=2":  "a time has a unit: 2s, or 2ms",
		"xprtsec=ssl":       "none, tls or mtls",
		"data_xprtsec=":     "none, tls or mtls",
		"tls_ca=ca":         "from / on",
		"metrics=9101":      "want HOST:PORT",
		"log-format=xml":    "want text or json",

		"passthrough=yes": "want off, ro or rw",

		"nvme-keepalive=6s":        "want a time from 500ms to 5s",
		"nvme-policy=service-time": "want adaptive, numa, round-robin or queue-depth",
		"nvme-policy":              "nvme-policy=adaptive|numa",
		"nvme-secretfile=secrets":  "want a path from / on",
		"nvme-hostnqn=":            "NQN",
		"nvme-hostnqn=nqn.host1":   "nqn.yyyy-mm",

		"nvme-discovery":         "nvme-discovery=HOST[:PORT][+HOST[:PORT]...]",
		"nvme-discovery=":        "want HOST[:PORT], of several with + between them",
		"nvme-discovery=a+":      "has no host; want HOST[:PORT]",
		"nvme-discovery=a+b:0":   `"b:0": "0" is not a port (1 to 65535); want HOST[:PORT]`,
		"nvme-discovery=fe80::7": "brackets",
		"nvme-discovery=nvme://": "not a port",

		"local-export":              "local-export=ADDR:EXPORT=DIR",
		"local-export=ds1:/a":       "want ADDR:EXPORT=DIR",
		"local-export=ds1:/a=a":     "want ADDR:EXPORT=DIR",
		"local-export=ds1=/a":       "want ADDR:EXPORT=DIR",
		"local-export=:/a=/a":       "is not a host",
		"local-export=ds1:0:/a=/a":  "not a port",
		"local-export=fe80::7:/a=/": "brackets",
	} {
		if _, err := parseOptions([]string{"ro", in}); err == nil || !strings.Contains(err.Error(), word) || !strings.Contains(err.Error(), in) {
			t.Errorf("%q: error %v does not say %q", in, err, word)
		}
	}
}

// TestOptionDefaults holds the help to the defaults.
func TestOptionDefaults(t *testing.T) {
	o, err := parseOptions([]string{"defaults,hard,resvport,timeo=600,retrans=2,nconnect=4,rsize=1MiB,wsize=1MiB,retain=256MiB,readahead=8MiB,mirror-timeout=1s,log-format=text,cache=none,close=written,lookupcache=none,localio=rw,passthrough=ro,nvme-policy=adaptive,nvme-keepalive=5s"})
	if err != nil || !reflect.DeepEqual(o, defaultOptions()) {
		t.Errorf("the defaults of the help are %+v, %v; those in effect %+v", o, err, defaultOptions())
	}
	help := optionsHelp()
	for _, want := range []string{"to 16 (default 4)", "READ sent to a data server (default 1MiB)", "WRITE sent to a data server (default 1MiB)", "(default 256MiB)"} {
		if !strings.Contains(help, want) {
			t.Errorf("the help does not say %q", want)
		}
	}
}

func TestEdits(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"abc", "abc", 0}, {"nconect", "nconnect", 1}, {"kitten", "sitting", 3}, {"ab", "ba", 2},
	} {
		if got := edits(c.a, c.b); got != c.want {
			t.Errorf("edits(%q, %q) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
	for name, want := range map[string]string{"max-write": "max_write", "wsiz": "wsize", "netdev": "_netdev"} {
		if got := nearestOption(name); got != want {
			t.Errorf("nearest to %q: %q, want %q", name, got, want)
		}
	}
}

func TestPickMounts(t *testing.T) {
	got, err := pickMounts([]mountinfo.Mount{
		{Dev: unix.Mkdev(8, 1), Mountpoint: "/", Type: "ext4", Source: "/dev/sda1", Super: "rw"},
		{Dev: unix.Mkdev(0, 52), Mountpoint: "/mnt/a b", Type: "fuse.weft", Source: "127.0.0.1:7049:/", Super: "rw,user_id=1000,group_id=100,default_permissions"},
		{Dev: unix.Mkdev(0, 53), Mountpoint: "/mnt/c", Type: "fuse.sshfs", Source: "host:/", Super: "rw,user_id=0"},
		{Dev: unix.Mkdev(0, 300), Mountpoint: "/mnt/a b", Type: "fuse.weft", Source: "[::1]:9,h:1:/with space", Super: "ro,user_id=0,group_id=0"},
	})
	want := []mountEntry{
		{unix.Mkdev(0, 52), 1000, "/mnt/a b", "127.0.0.1:7049:/"},
		{unix.Mkdev(0, 300), 0, "/mnt/a b", "[::1]:9,h:1:/with space"},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v, %v; want %+v", got, err, want)
	}
	if got[1].minor() != 300 {
		t.Errorf("minor %d", got[1].minor())
	}
	if got, err := pickMounts([]mountinfo.Mount{{Type: "fuse.weft", Super: "rw,user_id=root"}}); err == nil {
		t.Errorf("an owner that is no number: %+v", got)
	}
}

func TestCleanMountpoint(t *testing.T) {
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(top, "real", "mnt"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{
		"absolute": filepath.Join(top, "real", "mnt"), "relative": "real/mnt", "twice": "absolute", "parent": "real", "loop": "loop",
	} {
		if err := os.Symlink(target, filepath.Join(top, name)); err != nil {
			t.Fatal(err)
		}
	}
	want := filepath.Join(top, "real", "mnt")
	for _, in := range []string{"real/mnt", "real/mnt/", "absolute", "relative", "twice", "parent/mnt", "parent/../real/./mnt"} {
		if got, err := cleanMountpoint(top + "/" + in); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", in, got, err, want)
		}
	}
	if got, err := cleanMountpoint("/"); err != nil || got != "/" {
		t.Errorf("/: %s, %v", got, err)
	}
	if got, err := cleanMountpoint(filepath.Join(top, "loop")); err == nil {
		t.Errorf("a loop: %s", got)
	}
}

func TestPatience(t *testing.T) {
	for list, want := range map[string]layout.Patience{
		"":                            {},
		"timeo=50,retrans=5":          {},
		"soft":                        {Time: 3 * time.Minute, Errno: syscall.EIO},
		"softerr,timeo=50,retrans=1":  {Time: 10 * time.Second, Errno: syscall.ETIMEDOUT},
		"soft,timeo=5,retrans=0,hard": {},
	} {
		o, err := parseOptions([]string{list})
		if got := o.patience(); err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", list, got, err, want)
		}
	}
}

// Which data servers an option speaks of; it is shown as it can be given.
func TestLocalExport(t *testing.T) {
	info := metarpc.DeviceInfo{URL: "nfs://ds1:2049/srv/a?mountport=33", Device: metarpc.Device{Addrs: []string{"10.0.0.7:2049", "[fe80::7]:2049"}}}
	for in, want := range map[string]bool{
		"ds1:/srv/a=/x": true, "DS1:2049:/srv/a/=/x": true, "10.0.0.7:/srv/a=/x": true, "[fe80::7]:/srv/a=/x": true, "[fe80::7]:2049:/srv/a=/x": true,
		"ds2:/srv/a=/x": false, "ds1:2050:/srv/a=/x": false, "10.0.0.8:/srv/a=/x": false, "ds1:/srv=/x": false, "ds1:/srv/a/b=/x": false,
	} {
		e, err := parseLocalExport(in)
		if err != nil || e.names(info) != want {
			t.Errorf("%s: %v, %v", in, e.names(info), err)
		}
		o, err := parseOptions([]string{e.String()})
		if err != nil || len(o.exports) != 1 || o.exports[0] != e {
			t.Errorf("%s is shown as %v: %+v, %v", in, e, o.exports, err)
		}
	}
}

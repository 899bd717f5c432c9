package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/fs"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// mountOptions is what -o says.
type mountOptions struct {
	flags    uintptr // MS_ flags of mount(2)
	nconnect int
	rsize    int64         // bytes
	wsize    int64         // bytes
	soft     syscall.Errno // of requests that are given up; 0 = hard
	timeo    time.Duration
	retrans  int
	anyPort  bool // data servers see any source port
	secrecy  secrecy
	maxWrite int64 // bytes, 0 = the largest the kernel allows
	retain   int64 // bytes
	ahead    int64 // bytes, 0 = files are not read ahead
	mirror   time.Duration
	cache    string
	stable   bool // close waits for it
	local    string
	pass     fs.Passthrough
	exports  []localExport
	policy   nvmetcp.Policy
	hostNQN  string        // of this host as NVMe targets see it; "": see daemon.hostNQN
	kato     time.Duration // of NVMe controllers
	// discovery are the NVMe discovery controllers that are followed, host:port.
	discovery []string
	// transport serves the FUSE device.
	transport fs.Transport
	log       string
	logJSON   bool
	metrics   string // HOST:PORT; "": none
	profile   bool   // with profiles
	secrets   string // the file with those of this host for NVMe subsystems; "": none

	remount    bool
	background bool          // go on trying there
	retry      time.Duration // how long; less than 0: not said
	forAll     bool          // users other than the one who mounts may use it, which root's mounts are always for
}

// Values of the option localio.
const (
	localOff = "off"
	localRO  = "ro"
	localRW  = "rw"
)

// Values of the option cache.
const (
	cacheNone  = "none"
	cacheLease = "lease"
)

// errPolicy is what is wrong with the name of an NVMe multipath policy.
var errPolicy = fmt.Errorf("want %v, %v, %v or %v", nvmetcp.Adaptive, nvmetcp.NUMA, nvmetcp.RoundRobin, nvmetcp.QueueDepth)

func defaultOptions() mountOptions {
	return mountOptions{
		nconnect: 4,
		rsize:    1 << 20,
		wsize:    1 << 20,
		timeo:    nfs3.DefaultTimeout,
		retrans:  2,
		retain:   256 << 20,
		ahead:    8 << 20,
		mirror:   time.Second,
		cache:    cacheNone,
		local:    localRW,
		pass:     fs.PassReads,
		kato:     nvmetcp.DefaultKATO,
		retry:    -1,
	}
}

// option is one name that -o accepts. With a value it is NAME=VALUE.
type option struct {
	name  string
	value string // placeholder shown in the help; empty if the option has no value, in brackets if it may
	help  string
	set   func(o *mountOptions, value string) error
}

// mountOptionTable and generalOptionTable make the parser, the help, the manual, the completion and the suggestions. This one has weft's own options, which
// a mount keeps until it is unmounted.
var mountOptionTable = []option{
	numberOption("nconnect", "TCP connections to each address of a data server, 1 to 16 (default 4); one more is made for small requests when large ones are under way", 1, nfs3.MaxConnections, func(o *mountOptions, n int) { o.nconnect = n }),
	sizeOption("rsize", "largest READ sent to a data server (default 1MiB)", 4<<10, 4<<20, func(o *mountOptions) *int64 { return &o.rsize }),
	sizeOption("wsize", "largest WRITE sent to a data server (default 1MiB)", 4<<10, 4<<20, func(o *mountOptions) *int64 { return &o.wsize }),
	{"fg", "", "if the metadata service cannot be reached, fail (default)", func(o *mountOptions, _ string) error { o.background = false; return nil }},
	{"bg", "", "if the metadata service cannot be reached at once, go on trying in the background: the command succeeds then", func(o *mountOptions, _ string) error {
		o.background = true
		return nil
	}},
	numberOption("retry", "minutes for which reaching the metadata service is tried (default 0 with fg: once; 10000 with bg)", 0, 1e6, func(o *mountOptions, n int) {
		o.retry = time.Duration(n) * time.Minute
	}),
	softOption("hard", 0, "wait for a data server or a metadata service as long as it takes (default)"),
	softOption("soft", syscall.EIO, "fail reads, writes and fsync with EIO when a data server has not answered for timeo x (retrans + 1), and every call when nothing was heard of the metadata service for that long; programs that ignore errors lose data"),
	softOption("softerr", syscall.ETIMEDOUT, "the same with ETIMEDOUT"),
	numberOption("timeo", "tenths of a second without a reply after which a connection to a data server is made anew (default 600)", 1, 6000, func(o *mountOptions, n int) {
		o.timeo = time.Duration(n) * time.Second / 10
	}),
	numberOption("retrans", "how many times timeo a soft mount waits before it gives up (default 2)", 0, 1000, func(o *mountOptions, n int) { o.retrans = n }),
	{"resvport", "", "connect to data servers from a port below 1024 if the process may (default)", func(o *mountOptions, _ string) error { o.anyPort = false; return nil }},
	{"noresvport", "", "connect from any port; the exports must allow that (insecure)", func(o *mountOptions, _ string) error { o.anyPort = true; return nil }},
	{"xprtsec", "none|tls|mtls", "connections to metadata services and data servers (RFC 9289): in clear text, with TLS, or with TLS and a certificate of ours; never with less than that (default: mtls if tls_dir has a certificate, or else none)", func(o *mountOptions, v string) error {
		return setPolicy(&o.secrecy.policy, v)
	}},
	{"data_xprtsec", "none|tls|mtls", "connections to data servers, if they are another kind than xprtsec says", func(o *mountOptions, v string) error {
		return setPolicy(&o.secrecy.data, v)
	}},
	pathOption("tls_dir", "DIR", "directory with ca.pem, cert.pem, key.pem and maybe crl.pem (default: "+tlsDir+")", func(o *mountOptions) *string { return &o.secrecy.dir }),
	fileOption("tls_ca", "in place of tls_dir: PEM file of the certificates that sign those of servers (default: the system's)", func(o *mountOptions) *string { return &o.secrecy.files.CA }),
	fileOption("tls_cert", "PEM file of our certificate, for xprtsec=mtls", func(o *mountOptions) *string { return &o.secrecy.files.Cert }),
	fileOption("tls_key", "PEM file of the key that belongs to it", func(o *mountOptions) *string { return &o.secrecy.files.Key }),
	fileOption("tls_crl", "PEM file of certificates that are revoked", func(o *mountOptions) *string { return &o.secrecy.files.CRL }),
	sizeOption("max_write", "largest request the kernel sends (default: the largest of 8MiB, 4MiB, 1MiB it allows)", 64<<10, 8<<20, func(o *mountOptions) *int64 { return &o.maxWrite }),
	sizeOption("retain", "memory for written data until data servers have made it stable (default 256MiB)", 1<<20, 1<<40, func(o *mountOptions) *int64 { return &o.retain }),
	{"readahead", "SIZE", "how far a file is read ahead that is read from front to back, without O_DIRECT, and that nobody writes to, 64KiB to 1GiB (default 8MiB), or 0; all open files get 16 times as much", func(o *mountOptions, v string) error {
		n, err := humanize.ParseBytes(v)
		if err != nil || n != 0 && (n < fs.MinReadAhead || n > fs.MaxReadAhead) {
			return fmt.Errorf("want a size from 64KiB to 1GiB, or 0")
		}
		o.ahead = int64(n)
		return nil
	}},
	{"mirror-timeout", "TIME", "how long a copy of mirrored data may leave unanswered what another copy has answered, before it is done without, 1s to 1h (default 1s)", func(o *mountOptions, v string) error {
		d, err := parseTime(v)
		if err != nil {
			return err
		}
		if d < time.Second || d > time.Hour {
			return fmt.Errorf("want a time from 1s to 1h")
		}
		o.mirror = d
		return nil
	}},
	{"cache", "none|lease", "none: data does not stay in memory (default); lease: the kernel keeps data of files opened for reading, until somebody writes to them anywhere", func(o *mountOptions, v string) error {
		if v != cacheNone && v != cacheLease {
			return fmt.Errorf("want %s or %s", cacheNone, cacheLease)
		}
		o.cache = v
		return nil
	}},
	{"close", "written|stable", "written: close(2) waits until data servers have what was written (default); stable: until it is stable and its size durable, as NFS clients do", func(o *mountOptions, v string) error {
		if v != "written" && v != "stable" {
			return fmt.Errorf("want written or stable")
		}
		o.stable = v == "stable"
		return nil
	}},
	{"localio", "off|ro|rw", "what goes to data servers on this host without RPC, by descriptors of their files: reads and writes (rw, default), reads (ro), or nothing (off)", func(o *mountOptions, v string) error {
		if v != localOff && v != localRO && v != localRW {
			return fmt.Errorf("want off, ro or rw")
		}
		o.local = v
		return nil
	}},
	{"passthrough", "off|ro|rw", "which files the kernel serves by itself that are one data file on this host, whole: those opened for reading (ro, default), also those opened for writing (rw), or none (off); needs localio and Linux 6.9", func(o *mountOptions, v string) error {
		mode := slices.Index([]string{fs.PassNone: "off", fs.PassReads: "ro", fs.PassWrites: "rw"}, v)
		if mode < 0 {
			return fmt.Errorf("want off, ro or rw")
		}
		o.pass = fs.Passthrough(mode)
		return nil
	}},
	{"local-export", "ADDR:EXPORT=DIR", "DIR on this host is what the NFS server at ADDR (HOST or HOST:PORT, an IPv6 address in brackets), which is none of weft's, exports as EXPORT: if that turns out to be true its files are read without RPC; may be given several times", func(o *mountOptions, v string) error {
		e, err := parseLocalExport(v)
		if err == nil && !slices.Contains(o.exports, e) {
			o.exports = append(o.exports, e)
		}
		return err
	}},
	fileOption("nvme-secretfile", "file with the secrets by which this host proves itself to NVMe targets, of mode 600 and of whoever mounts: lines NQN DHHC-1:...[ DHHC-1:...], of the subsystem's name, the host's secret and, if the target is to prove itself, its secret; NQN * for all subsystems that are not named", func(o *mountOptions) *string { return &o.secrets }),
	{"nvme-policy", "adaptive|numa|round-robin|queue-depth", "which of several paths to an NVMe namespace a request takes: the one with the least time to wait, by bytes under way and latency (adaptive, default); one that is near to the processor; each in turn; or that with the fewest requests under way. weft nvme-policy changes it later", func(o *mountOptions, v string) (err error) {
		if o.policy, err = nvmetcp.ParsePolicy(v); err != nil {
			return errPolicy
		}
		return nil
	}},
	{"nvme-keepalive", "TIME", "after how long without a sign of life of its controller a path to an NVMe namespace is given up, as the controller gives up this host, 500ms to 5s (default 5s)", func(o *mountOptions, v string) error {
		// Not more than the default: by that the service knows when a client that was lost has nothing under way any more.
		d, err := parseTime(v)
		if err != nil {
			return err
		}
		if d < 500*time.Millisecond || d > nvmetcp.DefaultKATO || d%time.Millisecond != 0 {
			return fmt.Errorf("want a time from 500ms to %v, in whole milliseconds", nvmetcp.DefaultKATO)
		}
		o.kato = d
		return nil
	}},
	{"nvme-hostnqn", "NQN", "name of this host at NVMe targets, which may allow certain hosts only (default: what /etc/nvme/hostnqn says, or else a new one for each mount)", func(o *mountOptions, v string) error {
		if err := wire.CheckNQN(v); err != nil {
			return err
		}
		o.hostNQN = v
		return nil
	}},
	{"nvme-discovery", "HOST[:PORT][+HOST[:PORT]...]", "NVMe discovery controllers that tell the same (port 8009 if not said); the mount stays connected to one of them, and uses and leaves the addresses of NVMe targets as it tells", func(o *mountOptions, v string) (err error) {
		o.discovery, err = parseDiscovery(v)
		return err
	}},
	{"transport", "gofuse|device", "what serves the kernel's requests; gofuse: the server of the library go-fuse (default); device: a loop of weft's own, which is faster when many small reads or writes are under way", func(o *mountOptions, v string) error {
		for _, t := range []fs.Transport{fs.GoFuse, fs.DeviceLoop} {
			if v == t.String() {
				o.transport = t
				return nil
			}
		}
		return fmt.Errorf("want %v or %v", fs.GoFuse, fs.DeviceLoop)
	}},
	{"metrics", "HOST:PORT", "address for HTTP: /metrics in Prometheus' format, /healthz, /readyz (default: none)", func(o *mountOptions, v string) error {
		if _, _, err := net.SplitHostPort(v); err != nil {
			return fmt.Errorf("want HOST:PORT")
		}
		o.metrics = v
		return nil
	}},
	{"pprof", "", "also /debug/pprof/ there", func(o *mountOptions, _ string) error { o.profile = true; return nil }},
	{"log-format", "text|json", "how lines are logged (default text)", func(o *mountOptions, v string) error {
		if v != "text" && v != "json" {
			return fmt.Errorf("want text or json")
		}
		o.logJSON = v == "json"
		return nil
	}},
	{"log", "FILE", "where the serving process logs (default /var/log/weft/MOUNTPOINT.log, for others than root in a directory log beside the control socket; with -f standard error)", func(o *mountOptions, v string) error {
		if v == "" {
			return fmt.Errorf("want a file")
		}
		o.log = v
		return nil
	}},
}

func flagOption(name string, flag uintptr, on bool, help string) option {
	return option{name, "", help, func(o *mountOptions, _ string) error {
		o.flags &^= flag
		if on {
			o.flags |= flag
		}
		return nil
	}}
}

// atimeOption is one of several rules, of which the last one counts.
func atimeOption(name string, flag uintptr, help string) option {
	return option{name, "", help, func(o *mountOptions, _ string) error {
		o.flags = o.flags&^(unix.MS_NOATIME|unix.MS_STRICTATIME) | flag
		return nil
	}}
}

// softOption is one of several, of which the last one counts.
func softOption(name string, errno syscall.Errno, help string) option {
	return option{name, "", help, func(o *mountOptions, _ string) error { o.soft = errno; return nil }}
}

func fileOption(name, help string, field func(*mountOptions) *string) option {
	return pathOption(name, "FILE", help, field)
}

func pathOption(name, value, help string, field func(*mountOptions) *string) option {
	return option{name, value, help, func(o *mountOptions, v string) error {
		if !filepath.IsAbs(v) {
			return fmt.Errorf("want a path from / on")
		}
		*field(o) = v
		return nil
	}}
}

func numberOption(name, help string, least, most int, set func(*mountOptions, int)) option {
	return option{name, "N", help, func(o *mountOptions, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < least || n > most {
			return fmt.Errorf("want a number from %d to %d", least, most)
		}
		set(o, n)
		return nil
	}}
}

// patience is what hard, soft, softerr, timeo and retrans say together. As in nfs(5), the time for each answer is timeo
// and gets longer by timeo with each of retrans repetitions, so that is when the last one has ended.
func (o *mountOptions) patience() layout.Patience {
	if o.soft == 0 {
		return layout.Patience{}
	}
	return layout.Patience{Time: o.timeo * time.Duration(o.retrans+1), Errno: o.soft}
}

// passthrough is what the kernel may serve by itself. Of several copies it must not write one alone, so a file that has them is read so only
// where nobody can write.
func (o *mountOptions) passthrough() (fs.Passthrough, metarpc.Pin) {
	switch {
	case o.local == localOff || os.Geteuid() != 0:
		return fs.PassNone, metarpc.PinNone
	case o.flags&unix.MS_RDONLY != 0: // what may be written counts once the mount may be
		return o.pass, metarpc.PinAny
	}
	return o.pass, metarpc.PinOnly
}

// parseTime reads a time with its unit.
func parseTime(v string) (time.Duration, error) {
	if _, err := strconv.ParseFloat(v, 64); err == nil && v != "0" {
		return 0, fmt.Errorf("a time has a unit: %ss, or %sms", v, v)
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		return 0, fmt.Errorf("want a number and a unit, such as 1s, 500ms or 2m")
	}
	return d, nil
}

func sizeOption(name, help string, least, most int64, field func(*mountOptions) *int64) option {
	return option{name, "SIZE", help, func(o *mountOptions, v string) error {
		n, err := humanize.ParseBytes(v)
		if err != nil || n < uint64(least) || n > uint64(most) {
			return fmt.Errorf("want a size from %s to %s, such as 1MiB", humanize.IBytes(uint64(least)), humanize.IBytes(uint64(most)))
		}
		*field(o) = int64(n)
		return nil
	}}
}

// parseOptions reads the arguments of all -o flags in order; later ones win.
func parseOptions(lists []string) (mountOptions, error) {
	o := defaultOptions()
	return o, o.add(lists)
}

// add takes options in, in order; later ones win.
func (o *mountOptions) add(lists []string) error {
	for _, word := range optionWords(lists) {
		name, value, hasValue := strings.Cut(word, "=")
		opt, _ := findOption(name)
		switch {
		case opt == nil && elsewhereOptions[name] != "":
			return fmt.Errorf("option %q: weft has none of that name; %s", word, elsewhereOptions[name])
		case opt == nil:
			return fmt.Errorf("option %q: there is none of that name; did you mean %q?", word, nearestOption(name))
		case opt.value == "" && hasValue:
			return fmt.Errorf("option %q: %s takes no value", word, name)
		case opt.value != "" && !hasValue && opt.value[0] != '[':
			return fmt.Errorf("option %q: want %s=%s", word, name, opt.value)
		}
		if err := opt.set(o, value); err != nil {
			return fmt.Errorf("option %q: %w", word, err)
		}
	}
	return nil
}

// optionWords takes the arguments of -o flags apart.
func optionWords(lists []string) []string {
	return slices.DeleteFunc(strings.Split(strings.Join(lists, ","), ","), func(word string) bool { return word == "" })
}

// known leaves out words that are no options here, as sloppy(-s) asks for.
func known(words []string) []string {
	return slices.DeleteFunc(words, func(w string) bool {
		name, _, _ := strings.Cut(w, "=")
		opt, _ := findOption(name)
		return opt == nil
	})
}

// ownOptions are the words that are weft's own options.
func ownOptions(words []string) (own []string) {
	for _, w := range words {
		name, _, _ := strings.Cut(w, "=")
		if opt, mine := findOption(name); opt != nil && mine {
			own = append(own, w)
		}
	}
	return own
}

// findOption finds an option, and whether it is weft's own.
func findOption(name string) (opt *option, own bool) {
	for i := range mountOptionTable {
		if mountOptionTable[i].name == name {
			return &mountOptionTable[i], true
		}
	}
	for i := range generalOptionTable {
		have := generalOptionTable[i].name
		if have == name || strings.HasSuffix(have, "*") && strings.HasPrefix(strings.ToLower(name), strings.TrimSuffix(have, "*")) {
			return &generalOptionTable[i], false
		}
	}
	return nil, false
}

// nearestOption is the valid name with the fewest edits from name.
func nearestOption(name string) string {
	best, least := "", 1<<30
	for _, o := range slices.Concat(mountOptionTable, generalOptionTable) {
		if d := edits(name, o.name); d < least {
			best, least = o.name, d
		}
	}
	return best
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(row[j]+1, row[j-1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}

func optionsHelp() string {
	var b strings.Builder
	b.WriteString("\nOptions for -o, separated by commas:\n")
	for _, o := range mountOptionTable {
		fmt.Fprintf(&b, "  %-16s %s\n", o.usage(), o.help)
	}
	b.WriteString("\nOptions of mount(8), fstab(5) and the kernel:\n")
	for _, o := range generalOptionTable {
		fmt.Fprintf(&b, "  %-16s %s\n", o.usage(), o.help)
	}
	return b.String()
}

// usage is the option with the placeholder of its value.
func (o *option) usage() string {
	switch {
	case o.value == "":
		return o.name
	case o.value[0] == '[':
		return o.name + "[=" + o.value[1:]
	}
	return o.name + "=" + o.value
}

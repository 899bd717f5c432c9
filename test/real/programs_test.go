package real

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// together runs programs at once, each in its directory, and fails the test if one of them fails.
func together(t *testing.T, n int, run func(i int) *exec.Cmd) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Add(1)
		go func() { // ends with the program
			defer wg.Done()
			if out, err := run(i).CombinedOutput(); err != nil {
				t.Errorf("program %d: %v\n%.2000s", i, err, out)
			}
		}()
	}
	wg.Wait()
}

// sqlite runs SQL statements; who meets a lock waits for it.
func sqlite(dir, sql string) *exec.Cmd {
	cmd := exec.Command("sqlite3", "-batch", "-bail", "-cmd", ".timeout 60000", "test.db")
	cmd.Dir = dir
	cmd.Stdin = strings.NewReader(sql)
	return cmd
}

func sqliteSays(t *testing.T, dir, sql string) string {
	t.Helper()
	out, err := sqlite(dir, sql).CombinedOutput()
	if err != nil {
		t.Fatalf("sqlite3: %v\n%s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// transfers moves amounts between two tables, so that their sum never changes.
func transfers(n, writer int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "begin immediate; update a set x = x - %d; update b set x = x + %d; insert into log values (%d, %d, hex(randomblob(%d))); commit;\n",
			i, i, writer, i, 10+i*37%3000)
	}
	return b.String()
}

const sqliteTables = "create table a(x); create table b(x); insert into a values (1000); insert into b values (1000); create table log(writer, n, junk); create index by_junk on log(junk);"

// TestSQLiteWAL has several processes on one mount, who share memory through a mapping.
func TestSQLiteWAL(t *testing.T) {
	harness.Need(t, "sqlite3")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	if out := sqliteSays(t, m.Dir, "pragma journal_mode = wal; "+sqliteTables); out != "wal" {
		t.Fatalf("journal mode %q", out)
	}
	const writers = 4
	n := 40
	if *long {
		n = 2000
	}
	together(t, writers, func(i int) *exec.Cmd { return sqlite(m.Dir, transfers(n, i)) })
	want := fmt.Sprintf("ok\n2000\n%d", writers*n)
	if out := sqliteSays(t, m.Dir, "pragma integrity_check; select a.x + b.x from a, b; select count(*) from log;"); out != want {
		t.Fatalf("%q, want %q", out, want)
	}
}

// TestSQLiteMounts has a writer on one mount, with a rollback journal, and readers on another one, who must never see half of
// a transaction.
func TestSQLiteMounts(t *testing.T) {
	harness.Need(t, "sqlite3")
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	sqliteSays(t, a.Dir, "pragma journal_mode = delete; "+sqliteTables)
	n, reads := 40, 60
	if *long {
		n, reads = 1000, 1500
	}
	together(t, 4, func(i int) *exec.Cmd {
		if i == 0 {
			return sqlite(a.Dir, transfers(n, i))
		}
		// Of the least number there is no absolute value: another sum ends the program.
		check := "select abs(case when a.x + b.x = 2000 then 0 else -9223372036854775807 - 1 end) from a, b;\n"
		return sqlite(b.Dir, strings.Repeat(check+"select count(*) from log where junk > '8';\n", reads)+"pragma integrity_check;\n")
	})
	want := fmt.Sprintf("ok\n2000\n%d", n)
	for _, dir := range []string{a.Dir, b.Dir} {
		if out := sqliteSays(t, dir, "pragma integrity_check; select a.x + b.x from a, b; select count(*) from log;"); out != want {
			t.Fatalf("%q, want %q", out, want)
		}
	}
}

// TestPostgres has a database on the mount, kills it at work, and checks what recovery makes of it.
func TestPostgres(t *testing.T) {
	bins, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if len(bins) == 0 {
		t.Skip("missing: PostgreSQL (scripts/test installs it)")
	}
	bin := filepath.Dir(bins[len(bins)-1])
	seconds := 5
	if *long {
		seconds = 60
	}
	m := harness.NewVolume(t, harness.Options{}).Mount()
	sockets := harness.Dir(t)
	data := m.Dir + "/pg"
	harness.Run(t, "", "install", "-d", "-o", "postgres", "-m", "700", data)
	harness.Run(t, "", "chown", "postgres", sockets)
	as := func(name string, args ...string) *exec.Cmd {
		cmd := exec.Command("runuser", append([]string{"-u", "postgres", "--", filepath.Join(bin, name)}, args...)...)
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), "PGHOST="+sockets, "PGUSER=postgres", "PGDATABASE=postgres", "LC_ALL=C")
		return cmd
	}
	must := func(name string, args ...string) string {
		t.Helper()
		out, err := as(name, args...).CombinedOutput()
		if err != nil {
			log, _ := os.ReadFile(sockets + "/log")
			t.Fatalf("%s: %v\n%.3000s\n%.3000s", name, err, out, log)
		}
		return strings.TrimSpace(string(out))
	}
	query := func(sql string) string {
		t.Helper()
		return must("psql", "-X", "-At", "-v", "ON_ERROR_STOP=1", "-c", sql)
	}
	start := func() {
		must("pg_ctl", "-D", data, "-l", sockets+"/log", "-w", "-t", "60", "-o", "-k "+sockets+" -c listen_addresses= -c shared_buffers=16MB -c wal_recycle=off", "start")
	}
	must("initdb", "-D", data, "-A", "trust", "-E", "UTF8", "--no-locale", "--data-checksums")
	start()
	t.Cleanup(func() { as("pg_ctl", "-D", data, "-m", "immediate", "stop").Run() })
	must("pgbench", "-i", "-q", "-s", "2")
	query("create table marker as select 42 as x")
	bench := as("pgbench", "-T", strconv.Itoa(seconds), "-c", "4", "-j", "2", "-n")
	if err := bench.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Duration(seconds) * time.Second * 2 / 3)
	pidfile, err := os.ReadFile(data + "/postmaster.pid")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.SplitN(string(pidfile), "\n", 2)[0])
	if err != nil {
		t.Fatal(err)
	}
	children := harness.Run(t, "", "sh", "-c", fmt.Sprintf("ps -o pid= --ppid %d", pid))
	unix.Kill(pid, unix.SIGKILL)
	for _, c := range strings.Fields(children) {
		if n, err := strconv.Atoi(c); err == nil {
			unix.Kill(n, unix.SIGKILL)
		}
	}
	if bench.Wait() == nil {
		t.Fatal("pgbench did not notice that the server was killed")
	}
	harness.Await(t, "the killed server to be gone", func() bool { return unix.Kill(pid, 0) == unix.ESRCH })
	start()
	sums := query("select sum(abalance) from pgbench_accounts") + " " + query("select sum(bbalance) from pgbench_branches") + " " +
		query("select sum(tbalance) from pgbench_tellers") + " " + query("select sum(delta) from pgbench_history")
	if f := strings.Fields(sums); len(f) != 4 || f[0] != f[1] || f[0] != f[2] || f[0] != f[3] {
		t.Errorf("the sums after recovery do not agree: %s", sums)
	}
	if n := query("select count(*) from pgbench_history"); n == "0" {
		t.Error("no transaction survived")
	} else {
		t.Logf("%s transactions before the kill", n)
	}
	if x := query("select x from marker"); x != "42" {
		t.Errorf("marker %s", x)
	}
	must("pg_amcheck", "--install-missing", "--heapallindexed", "--all")
	must("pgbench", "-T", "1", "-c", "4", "-n")
	must("pg_ctl", "-D", data, "-w", "stop")
	must("pg_checksums", "-D", data, "--check")
}

// TestGitMounts pushes to one repository from two mounts in turn.
func TestGitMounts(t *testing.T) {
	harness.Need(t, "git")
	v := harness.NewVolume(t, harness.Options{})
	all := []*harness.Mount{v.Mount(), v.Mount()}
	git := func(dir string, args ...string) string {
		t.Helper()
		return harness.Run(t, dir, "git", append([]string{"-c", "user.name=t", "-c", "user.email=t@t", "-c", "safe.directory=*", "-c", "init.defaultBranch=main", "-c", "gc.autoDetach=false"}, args...)...)
	}
	git(all[0].Dir, "init", "-q", "--bare", "repo.git")
	git(all[1].Dir, "clone", "-q", "repo.git", "work1")
	git(all[0].Dir, "clone", "-q", "repo.git", "work0")
	rounds := 6
	if *long {
		rounds = 200
	}
	for i := range rounds {
		n := i % 2
		work := fmt.Sprintf("%s/work%d", all[n].Dir, n)
		if i > 0 {
			git(work, "pull", "-q", "--rebase", "origin", "main")
			if b, err := os.ReadFile(work + "/file"); err != nil || string(b) != fmt.Sprint(i-1) {
				t.Fatalf("round %d: %q, %v", i, b, err)
			}
		}
		if err := os.WriteFile(work+"/file", []byte(fmt.Sprint(i)), 0o644); err != nil {
			t.Fatal(err)
		}
		git(work, "add", "file")
		git(work, "commit", "-qm", fmt.Sprint("round ", i))
		git(work, "push", "-q", "origin", "HEAD:main")
		// Work trees too can be used from either mount.
		if out := git(fmt.Sprintf("%s/work%d", all[1-n].Dir, n), "status", "--porcelain"); out != "" {
			t.Fatalf("round %d: status through the other mount:\n%s", i, out)
		}
	}
	git(all[0].Dir+"/repo.git", "gc", "-q")
	git(all[1].Dir+"/repo.git", "fsck", "--strict")
	if n := strings.TrimSpace(git(all[1].Dir+"/repo.git", "rev-list", "--count", "main")); n != fmt.Sprint(rounds) {
		t.Fatalf("%s commits of %d", n, rounds)
	}
}

// zoo makes a tree with all that a backup has to carry: links of both kinds, odd modes and owners, times, FIFOs, devices,
// holes, extended attributes, access control lists.
func zoo(t *testing.T) string {
	t.Helper()
	harness.Need(t, "setfacl", "setfattr")
	dir := t.TempDir()
	harness.Run(t, dir, "sh", "-ec", `
		mkdir -p d/e/f empty sticky; chmod 1777 sticky; chmod 2755 d
		for i in 1 2 3 4 5 6 7 8; do head -c $((i * 17000)) /dev/urandom >d/e/$i; chmod $((640 + i % 8)) d/e/$i; done
		: >nothing; truncate -s 3M hole; printf end >>hole
		ln d/e/1 hardlink; ln d/e/1 d/e/f/hardlink; ln -s d/e/2 symlink; ln -s /no/such/place dangling
		mkfifo fifo; mknod null c 1 3; mknod disk b 7 200
		cp /bin/true setuid; chown 12:34 setuid; chmod 6755 setuid; chown -h 55:66 dangling; chown 1000:1000 d/e
		touch -d '1985-10-26 01:21:00.123456789' d/e/3; touch -h -d 1999-12-31 symlink
		setfattr -n user.note -v 'on a file' d/e/4; setfattr -n user.dir -v 'on a directory' d; setfattr -n user.empty d/e/5
		setfattr -n trusted.t -v secret d/e/5
		setfacl -m u:1001:rw,g:1002:r d/e/6; setfacl -d -m u:1003:rwx d/e/f; setfacl -m u:1004:rx d/e/f
		touch -d 2001-02-03 d/e d`)
	return dir
}

// alike fails the test unless rsync finds no difference between two trees, in bytes and everything else.
func alike(t *testing.T, a, b string) {
	t.Helper()
	if out := harness.Run(t, "", "rsync", "-aHAX", "--checksum", "--delete", "--dry-run", "--itemize-changes", a+"/", b+"/"); out != "" {
		t.Errorf("rsync sees differences:\n%.2000s", out)
	}
}

func TestRsyncAll(t *testing.T) {
	harness.Need(t, "rsync")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	src, back := zoo(t), filepath.Join(t.TempDir(), "back")
	harness.Run(t, "", "rsync", "-aHAX", src+"/", m.Dir+"/there")
	alike(t, src, m.Dir+"/there")
	harness.Run(t, "", "rsync", "-aHAX", m.Dir+"/there/", back)
	alike(t, src, back)
}

func TestTarAll(t *testing.T) {
	harness.Need(t, "tar", "rsync")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	src, back := zoo(t), filepath.Join(t.TempDir(), "back")
	carry := func(from, to string) {
		t.Helper()
		if err := os.Mkdir(to, 0o755); err != nil {
			t.Fatal(err)
		}
		harness.Run(t, "", "sh", "-ec", fmt.Sprintf("tar -C %s --sparse --xattrs --xattrs-include='*' --acls -cf - . | tar -C %s --same-owner -p --xattrs --xattrs-include='*' --acls -xf -", from, to))
	}
	carry(src, m.Dir+"/there")
	alike(t, src, m.Dir+"/there")
	carry(m.Dir+"/there", back)
	alike(t, src, back)
}

func TestDebianPackage(t *testing.T) {
	harness.Need(t, "dpkg-deb", "rsync")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	tree, deb := t.TempDir(), filepath.Join(t.TempDir(), "test.deb")
	os.Chmod(tree, 0o755)
	harness.Run(t, tree, "sh", "-ec", fmt.Sprintf(`
		mkdir -p DEBIAN usr/share usr/bin; printf 'Package: weft-test\nVersion: 1\nArchitecture: all\nMaintainer: t\nDescription: t\n' >DEBIAN/control
		cp -a %s usr/share/net; cp /bin/true usr/bin/t; chmod 4755 usr/bin/t; ln usr/bin/t usr/bin/u; ln -s t usr/bin/v`, filepath.Join(harness.Root, "internal")))
	harness.Run(t, tree, "dpkg-deb", "-Zgzip", "--root-owner-group", "-b", ".", deb)
	plain := filepath.Join(t.TempDir(), "plain")
	harness.Run(t, "", "dpkg-deb", "-x", deb, m.Dir+"/x")
	harness.Run(t, "", "dpkg-deb", "-x", deb, plain)
	// dpkg-deb puts symbolic links last, so that the directory of one is as old as the unpacking.
	for _, dir := range []string{plain, m.Dir + "/x"} {
		harness.Run(t, dir, "touch", "-d", "@0", "usr/bin")
	}
	alike(t, plain, m.Dir+"/x")
}

// TestMake builds a C project of many files in parallel on the mount, changes a header, and builds again.
func TestMake(t *testing.T) {
	harness.Need(t, "make", "gcc")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	files := 30
	if *long {
		files = 300
	}
	dir := m.Dir + "/project"
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var declare, call strings.Builder
	for i := range files {
		put(fmt.Sprintf("f%d.c", i), fmt.Sprintf("#include \"common.h\"\nint f%d(int x) { return x + FACTOR * %d; }\n", i, i))
		fmt.Fprintf(&declare, "int f%d(int);\n", i)
		fmt.Fprintf(&call, "x = f%d(x);\n", i)
	}
	put("all.h", declare.String())
	put("common.h", "#define FACTOR 1\n")
	put("main.c", "#include <stdio.h>\n#include \"all.h\"\nint main(void) { int x = 0;\n"+call.String()+"printf(\"%d\\n\", x); return 0; }\n")
	put("Makefile", `objects := $(patsubst %.c,%.o,$(wildcard f*.c))
prog: main.o libf.a
	gcc -o $@ main.o -L. -lf
libf.a: $(objects)
	ar rcs $@ $^
%.o: %.c
	gcc -O0 -MMD -c -o $@ $<
-include $(wildcard *.d)
`)
	sum := files * (files - 1) / 2
	for _, factor := range []int{1, 3} {
		put("common.h", fmt.Sprintf("#define FACTOR %d\n", factor))
		harness.Run(t, dir, "make", "-j4")
		if out := strings.TrimSpace(harness.Run(t, dir, "./prog")); out != fmt.Sprint(sum*factor) {
			t.Fatalf("the program says %s, want %d", out, sum*factor)
		}
		if out := harness.Run(t, dir, "make", "-j4"); !strings.Contains(out, "up to date") {
			t.Fatalf("make again: %s", out)
		}
	}
}

// TestLockedCounter has processes on two mounts that count under a lock of fcntl(2).
func TestLockedCounter(t *testing.T) {
	const python = "/usr/bin/python3"
	if _, err := os.Stat(python); err != nil {
		t.Skip("missing: " + python + " (scripts/test installs it)")
	}
	v := harness.NewVolume(t, harness.Options{})
	n := 50
	if *long {
		n = 3000
	}
	const program = `
import fcntl, multiprocessing, os, sys
name, n = sys.argv[1], int(sys.argv[2])
def count():
    with open(name, "r+b", buffering=0) as f:
        for _ in range(n):
            fcntl.lockf(f, fcntl.LOCK_EX)
            f.seek(0)
            value = int(f.read() or b"0")
            f.seek(0)
            f.write(b"%d" % (value + 1))
            fcntl.lockf(f, fcntl.LOCK_UN)
workers = [multiprocessing.Process(target=count) for _ in range(3)]
for w in workers: w.start()
for w in workers: w.join()
sys.exit(any(w.exitcode for w in workers))
`
	a, b := v.Mount(), v.Mount()
	for _, c := range []struct {
		name string
		dirs []string
	}{{"one mount", []string{a.Dir, a.Dir}}, {"two mounts", []string{a.Dir, b.Dir}}} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(a.Dir+"/counter", nil, 0o644); err != nil {
				t.Fatal(err)
			}
			together(t, len(c.dirs), func(i int) *exec.Cmd {
				return exec.Command(python, "-c", program, c.dirs[i]+"/counter", strconv.Itoa(n))
			})
			got, err := os.ReadFile(b.Dir + "/counter")
			if want := fmt.Sprint(len(c.dirs) * 3 * n); err != nil || string(got) != want {
				t.Errorf("counted %q (%v), want %s", got, err, want)
			}
		})
	}
}

func TestDbench(t *testing.T) {
	harness.Need(t, "dbench")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	seconds := 3
	if *long {
		seconds = 60
	}
	out := harness.Run(t, "", "dbench", "-c", "/usr/share/dbench/client.txt", "-D", m.Dir, "-t", strconv.Itoa(seconds), "4")
	if !strings.Contains(out, "Throughput") {
		t.Fatalf("dbench: %.2000s", out)
	}
	t.Log(out[strings.Index(out, "Throughput"):])
}

// stressors of stress-ng that work on files of a directory, in the short form, where those of a line run at once.
var stressors = []string{
	"chdir copy-file dentry dir fallocate fcntl flock fpunch",
	"getdent hdd link lockf rename symlink utime xattr",
}

// TestStress runs stressors of stress-ng, which check what they do (--verify), as a user without privileges.
func TestStress(t *testing.T) {
	harness.Need(t, "stress-ng", "setpriv")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	work := m.Dir + "/stress"
	harness.Run(t, "", "install", "-d", "-o", "nobody", work)
	groups := stressors
	if *long {
		out, _ := exec.Command("stress-ng", "--class", "filesystem?").CombinedOutput()
		_, list, ok := strings.Cut(string(out), "stressors:")
		if !ok {
			t.Fatalf("stress-ng does not list its file system stressors: %s", out)
		}
		groups = strings.Fields(list)
	}
	ran := 0
	for _, group := range groups {
		args := []string{"--reuid=nobody", "--regid=nogroup", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
			"stress-ng", "--timeout", "2s", "--temp-path", work, "--verify", "--oomable", "--hdd-bytes", "8m", "--fallocate-bytes", "8m", "--fpunch-ops", "200"}
		for _, name := range strings.Fields(group) {
			args = append(args, "--"+name, "2")
		}
		cmd := exec.Command("setpriv", args...)
		cmd.Dir = work
		out, err := cmd.CombinedOutput()
		switch {
		case bytes.Contains(out, []byte("No stress workers invoked")):
			t.Logf("%s: stress-ng does not do that", group) // pathological ones, and what it was built without
		case err != nil && cmd.ProcessState.ExitCode() != stressNotSupported:
			t.Errorf("%s: %v\n%.3000s", group, err, out)
		default:
			ran++
		}
	}
	if ran < len(groups)*3/4 {
		t.Errorf("only %d of %d ran", ran, len(groups))
	}
	if left, err := os.ReadDir(work); err != nil || len(left) > 0 {
		t.Errorf("stress-ng left files behind: %v, %v", left, err)
	}
}

// stressNotSupported is the exit code of stress-ng if the system lacks what a stressor is about.
const stressNotSupported = 4

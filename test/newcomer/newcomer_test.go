package newcomer

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

var cold = flag.Bool("cold", false, "without what Go has compiled and downloaded before")

// block is the indented block of the README that begins with a line.
func block(t *testing.T, first string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(harness.Root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(b), "\n    "+first)
	if !found {
		t.Fatalf("the README has no line %q", first)
	}
	for line := range strings.Lines("    " + first + rest) {
		command, indented := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		switch {
		case indented:
			lines = append(lines, command)
		case command != "":
			return lines
		}
	}
	return lines
}

// TestFirstFile clones, and has a file in a volume within a minute, or within five if nothing was there before.
func TestFirstFile(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "git")
	clone := filepath.Join(harness.Dir(t), "clone")
	mountpoint := harness.Dir(t)
	limit := time.Minute
	env := os.Environ()
	if *cold {
		limit = 5 * time.Minute
		env = append(env, "GOCACHE="+harness.Dir(t), "GOMODCACHE="+harness.Dir(t), "GOFLAGS=-modcacherw")
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	began := time.Now()
	if _, err := os.Stat(filepath.Join(harness.Root, ".git")); err == nil {
		harness.Run(t, "", "git", "clone", "-q", harness.Root, clone)
	} else if err := os.CopyFS(clone, os.DirFS(harness.Root)); err != nil {
		t.Fatal(err)
	}
	command, _, _ := strings.Cut(block(t, "scripts/quickstart /mnt/weft ")[0], "#")
	command = strings.ReplaceAll(command, "/mnt/weft", mountpoint)
	script := command + "\necho hello > " + mountpoint + "/first\ncat " + mountpoint + "/first\n"
	cmd := exec.CommandContext(ctx, "bash", "-ec", script)
	cmd.Dir, cmd.Env = clone, env
	defer func() {
		stop := exec.Command("scripts/quickstart", "--stop", "--purge")
		stop.Dir, stop.Env = clone, env
		if out, err := stop.CombinedOutput(); err != nil {
			t.Errorf("quickstart --stop: %v\n%s", err, out)
		}
	}()
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "hello\n") {
		t.Fatalf("after %v: %v\n%s", time.Since(began), err, out)
	}
	t.Logf("a first file after %v", time.Since(began))
}

// host is one of its own, as far as that matters: network, names of hosts, /etc, /srv, /var/lib, /run and /mnt.
type host struct {
	t    *testing.T
	name string
	pid  int
}

const storageAddr = "10.77.0.1"

func newHost(t *testing.T, name string) *host {
	t.Helper()
	private := harness.Dir(t)
	for _, dir := range []string{"etc", "etc-work", "srv", "lib", "lib-work", "run", "mnt", "home"} {
		if err := os.Mkdir(filepath.Join(private, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script := `mount --make-rprivate / &&
		mkdir -p /srv /mnt &&
		for dir in etc:/etc lib:/var/lib; do
			mount -t tmpfs tmpfs "$1/${dir%:*}-work" && mkdir "$1/${dir%:*}-work/up" "$1/${dir%:*}-work/work" &&
			mount -t overlay overlay -o "lowerdir=${dir#*:},upperdir=$1/${dir%:*}-work/up,workdir=$1/${dir%:*}-work/work" "${dir#*:}" || exit
		done &&
		mount --bind "$1/srv" /srv && mount --bind "$1/mnt" /mnt && mount -t tmpfs tmpfs /run &&
		printf '127.0.0.1 localhost\n%s storage\n' ` + storageAddr + ` > /etc/hosts &&
		ip link set lo up && echo ready && exec sleep infinity`
	cmd := exec.Command("unshare", "-n", "-m", "-u", "sh", "-c", "hostname "+name+" && "+script, "sh", private)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err == nil {
		cmd.Stderr = os.Stderr
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	b := make([]byte, 6)
	if n, err := out.Read(b); err != nil || string(b[:n]) != "ready\n" {
		t.Fatalf("host %s: %q, %v", name, b[:n], err)
	}
	return &host{t, name, cmd.Process.Pid}
}

// command is a script on the host, by whose end everything that it has started ends with the test.
func (h *host) command(ctx context.Context, script string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", "-t", fmt.Sprint(h.pid), "-n", "-m", "-u", "bash", "-c", "cd /srv\n"+script)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(harness.Bin(h.t, "weft"))+":"+os.Getenv("PATH"))
	return cmd
}

func (h *host) run(ctx context.Context, script string) (string, error) {
	out, err := h.command(ctx, script).CombinedOutput()
	return string(out), err
}

func (h *host) must(ctx context.Context, script string) string {
	h.t.Helper()
	out, err := h.run(ctx, "set -e\n"+script)
	if err != nil {
		h.t.Fatalf("on %s: %v\n%s\n%s", h.name, err, script, out)
	}
	return out
}

// TestSecured makes the set-up with certificates that the README describes, on three hosts.
func TestSecured(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "unshare", "nsenter", "ip")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	storage, clients := newHost(t, "storage"), []*host{newHost(t, "trainer1"), newHost(t, "trainer2")}
	storage.must(ctx, "ip addr add "+storageAddr+"/32 dev lo")
	for i, c := range clients {
		storage.must(ctx, fmt.Sprintf("ip link add c%d type veth peer name eth0 netns %d && ip addr add 10.77.%d.1/24 dev c%[1]d && ip link set c%[1]d up", i, c.pid, i+1))
		c.must(ctx, fmt.Sprintf("ip addr add 10.77.%d.2/24 dev eth0 && ip link set eth0 up && ip route add %s via 10.77.%[1]d.1", i+1, storageAddr))
	}
	var serving, client []string
	at := &serving
	for _, line := range block(t, "# on storage")[1:] {
		if strings.HasPrefix(line, "# on trainer1") {
			at = &client
			continue
		}
		*at = append(*at, line)
	}
	// What goes on in the background there goes on here until the end of the test; whoever types needs a moment for the next line.
	for _, line := range serving {
		if background, ok := strings.CutSuffix(line, " &"); ok {
			cmd := storage.command(context.Background(), "exec "+background)
			log, err := os.Create(filepath.Join(harness.Dir(t), "log"))
			if err != nil {
				t.Fatal(err)
			}
			cmd.Stdout, cmd.Stderr = log, log
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				cmd.Process.Signal(syscall.SIGTERM)
				cmd.Wait()
				if b, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
					t.Logf("%s:\n%s", background, b)
				}
			})
			time.Sleep(time.Second)
			continue
		}
		storage.must(ctx, line)
	}
	for i, c := range clients {
		name := fmt.Sprintf("trainer%d", i+1)
		c.must(ctx, "umask 077; cat > "+name+".token <<'END'\n"+storage.must(ctx, "cat "+name+".token")+"END")
		for _, line := range client {
			c.must(ctx, strings.ReplaceAll(line, "trainer1", name))
		}
		t.Cleanup(func() {
			if out, err := c.run(context.Background(), "! mountpoint -q /mnt/weft || timeout 60 weft umount /mnt/weft"); err != nil {
				t.Errorf("weft umount: %v\n%s", err, out)
			}
		})
	}
	clients[0].must(ctx, "echo secret > /mnt/weft/file; weft sync /mnt/weft")
	if out := clients[1].must(ctx, "cat /mnt/weft/file"); out != "secret\n" {
		t.Errorf("trainer2 reads %q", out)
	}
	if out := clients[1].must(ctx, "weft status /mnt/weft"); !strings.Contains(out, "tls (xprtsec=mtls)") || !strings.Contains(out, "metadata    storage:7049 (xprtsec=mtls), ") {
		t.Errorf("weft status says\n%s", out)
	}
	// Who has joined with a token does not lend it to another, and who has none does not come in.
	if out, err := clients[1].run(ctx, "umask 077; echo '"+strings.TrimSpace(storage.must(ctx, "cat trainer1.token"))+"' > t; weft join storage --token-file t --dir /srv/other"); err == nil || !strings.Contains(out, "used by somebody else") {
		t.Errorf("a token for the second time: %v\n%s", err, out)
	}
	if out, err := clients[1].run(ctx, "mkdir -p /mnt/clear; weft mount -o xprtsec=none storage:/ /mnt/clear"); err == nil || !strings.Contains(out, "xprtsec=") {
		t.Errorf("in clear text: %v\n%s", err, out)
	}
	storage.must(ctx, "weftd ca revoke --dir /etc/weft-ca --name trainer2")
	harness.Await(t, "the end of what is revoked", func() bool {
		out, err := clients[1].run(ctx, "timeout 5 cat /mnt/weft/file; timeout 5 weft admin device ls --server storage")
		return err != nil && strings.Contains(out, "does not take our certificate")
	})
	if out := clients[0].must(ctx, "cat /mnt/weft/file"); out != "secret\n" {
		t.Errorf("trainer1 reads %q", out)
	}
	clients[1].must(ctx, "weft umount --force /mnt/weft")
}

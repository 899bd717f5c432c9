package posix

import (
	"fmt"
	"strings"
	"time"
)

// A lockScript is what two processes, A and B, do in turn, and what each step answers.
type lockScript struct{ name, steps, want string }

// blocked is how long an order takes at most, on a busy machine, to get to where it waits.
const blocked = 300 * time.Millisecond

// runLocks does the steps, which are separated by ";" and start with the process's letter. In orders p stands for a file.
// "A> order" sends an order that is going to wait, "A<" gives its answer; "A!" ends A, "A#" kills it.
func runLocks(dirs map[byte]world, steps string) any {
	procs := map[byte]*locker{}
	for name := range dirs {
		procs[name] = newLocker()
	}
	defer func() {
		for _, l := range procs {
			l.kill()
		}
	}()
	var answers []string
	for step := range strings.SplitSeq(steps, ";") {
		step = strings.TrimSpace(step)
		l := procs[step[0]]
		order := strings.Fields(step[1:])
		for i, f := range order {
			if f == "p" {
				order[i] = dirs[step[0]].at("p")
			}
		}
		switch step[1] {
		case '>':
			l.send(strings.Join(order[1:], " "))
			time.Sleep(blocked)
		case '<':
			answers = append(answers, l.answer())
		case '!':
			l.end()
		case '#':
			l.kill()
		default:
			answers = append(answers, l.do(strings.Join(order, " ")))
		}
	}
	return strings.Join(answers, ", ")
}

const bothOpen = "A open f p; B open f p; "

var lockScripts = func() []lockScript {
	var out []lockScript
	// Every pair of locks by two processes, of three sorts.
	for _, sort := range []string{"posix", "ofd"} {
		for _, a := range []string{"r 0 10", "w 0 10", "w 0 0", "r 5 5"} {
			for _, b := range []string{"r 0 10", "w 0 10", "w 10 5", "r 10 0", "w 9 1", "w 100 1"} {
				var sa, la, sb, lb int
				fmt.Sscan(a[2:], &sa, &la)
				fmt.Sscan(b[2:], &sb, &lb)
				end := func(s, l int) int {
					if l == 0 {
						return 1 << 30
					}
					return s + l
				}
				want := "ok, ok, ok, ok"
				if (a[0] == 'w' || b[0] == 'w') && sa < end(sb, lb) && sb < end(sa, la) {
					want = "ok, ok, ok, EAGAIN"
				}
				out = append(out, lockScript{fmt.Sprintf("%s %s then %s", sort, a, b), bothOpen + fmt.Sprintf("A %s f %s; B %s f %s", sort, a, sort, b), want})
			}
		}
	}
	for _, a := range []string{"sh", "ex"} {
		for _, b := range []string{"sh", "ex"} {
			want := "ok, ok, ok, EAGAIN"
			if a == "sh" && b == "sh" {
				want = "ok, ok, ok, ok"
			}
			out = append(out, lockScript{"flock " + a + " then " + b, bothOpen + "A flock f " + a + "; B flock f " + b, want})
		}
	}
	return append(out, []lockScript{
		{"posix unlock lets the other", bothOpen + "A posix f w 0 10; A posix f u 0 10; B posix f w 0 10", "ok, ok, ok, ok, ok"},
		{"posix unlock of the middle", bothOpen + "A posix f w 0 10; A posix f u 3 3; B posix f w 3 3; B posix f w 2 1; B posix f w 6 1", "ok, ok, ok, ok, ok, EAGAIN, EAGAIN"},
		{"posix lock of the own range again", bothOpen + "A posix f w 0 10; A posix f r 0 10; B posix f r 0 10; B posix f w 0 1", "ok, ok, ok, ok, ok, EAGAIN"},
		{"posix upgrade is refused", bothOpen + "A posix f r 0 10; B posix f r 0 10; A posix f w 0 10", "ok, ok, ok, ok, EAGAIN"},
		{"posix close of any descriptor drops the locks", bothOpen + "A open g p; A posix f w 0 10; A close g; B posix f w 0 10", "ok, ok, ok, ok, ok, ok"},
		{"posix locks end with the process", bothOpen + "A posix f w 0 10; A!; B posix f w 0 10 wait", "ok, ok, ok, ok"},
		{"posix locks end with a killed process", bothOpen + "A posix f w 0 10; A#; B posix f w 0 10 wait", "ok, ok, ok, ok"},
		{"posix wait", bothOpen + "A posix f w 0 10; B> posix f w 0 10 wait; A posix f u 0 10; B<", "ok, ok, ok, ok, ok"},
		{"posix wait for a process that ends", bothOpen + "A posix f w 0 10; B> posix f w 0 10 wait; A!; B<", "ok, ok, ok, ok"},
		{"posix wait for a reader", bothOpen + "A posix f r 0 10; B> posix f w 5 1 wait; A posix f u 0 10; B<", "ok, ok, ok, ok, ok"},
		{"posix deadlock", bothOpen + "A posix f w 0 1; B posix f w 1 1; B> posix f w 0 1 wait; A posix f w 1 1 wait; A posix f u 0 1; B<", "ok, ok, ok, ok, EDEADLK, ok, ok"},
		{"posix test of what is free", bothOpen + "A posix f w 0 10 test", "ok, ok, free"},
		{"posix test tells the owner", bothOpen + "A posix f w 3 4; B posix f r 0 10 test", "ok, ok, ok, w 3 4 true"},
		{"posix test of own lock", bothOpen + "A posix f w 3 4; A posix f r 0 10 test", "ok, ok, ok, free"},
		{"posix write lock needs a descriptor for writing", "A open f p; B openr f p; B posix f w 0 1; B posix f r 0 1", "ok, ok, EBADF, ok"},
		{"posix negative length", bothOpen + "A posix f w 10 -5; B posix f w 5 1; B posix f w 4 1; B posix f w 10 1", "ok, ok, ok, EAGAIN, ok, ok"},
		{"posix range below 0", bothOpen + "A posix f w 0 -5", "ok, ok, EINVAL"},
		{"posix lock of one file does not close another", "A open f p; B open f p; A write f xy 0; B posix f w 0 1; A read f 2 0", "ok, ok, ok, ok, xy"},
		{"posix adjacent locks merge", bothOpen + "A posix f w 0 5; A posix f w 5 5; B posix f w 0 0 test", "ok, ok, ok, ok, w 0 10 true"},
		{"ofd of one process's two descriptors", "A open f p; A open g p; A ofd f w 0 1; A ofd g w 0 1", "ok, ok, ok, EAGAIN"},
		{"ofd stays when another descriptor is closed", bothOpen + "A open g p; A ofd f w 0 1; A close g; B ofd f w 0 1", "ok, ok, ok, ok, ok, EAGAIN"},
		{"ofd ends with its descriptor", bothOpen + "A ofd f w 0 1; A close f; B ofd f w 0 1 wait", "ok, ok, ok, ok, ok"},
		{"ofd and posix conflict", bothOpen + "A ofd f w 0 1; B posix f w 0 1", "ok, ok, ok, EAGAIN"},
		{"ofd wait", bothOpen + "A ofd f w 0 1; B> ofd f w 0 1 wait; A ofd f u 0 1; B<", "ok, ok, ok, ok, ok"},
		{"ofd ends with a killed process", bothOpen + "A ofd f w 0 1; A#; B ofd f w 0 1 wait", "ok, ok, ok, ok"},
		{"ofd test", bothOpen + "A ofd f w 3 4; B ofd f r 0 10 test", "ok, ok, ok, w 3 4 false"},
		{"flock of two descriptors", "A open f p; A open g p; A flock f ex; A flock g sh", "ok, ok, ok, EAGAIN"},
		{"flock unlock lets the other", bothOpen + "A flock f ex; A flock f un; B flock f ex", "ok, ok, ok, ok, ok"},
		{"flock upgrade", bothOpen + "A flock f sh; A flock f ex; B flock f sh", "ok, ok, ok, ok, EAGAIN"},
		{"flock upgrade is refused", bothOpen + "A flock f sh; B flock f sh; A flock f ex", "ok, ok, ok, ok, EAGAIN"},
		{"flock downgrade", bothOpen + "A flock f ex; A flock f sh; B flock f sh", "ok, ok, ok, ok, ok"},
		{"flock ends with its descriptor", bothOpen + "A flock f ex; A close f; B flock f ex wait", "ok, ok, ok, ok, ok"},
		{"flock ends with a killed process", bothOpen + "A flock f ex; A#; B flock f ex wait", "ok, ok, ok, ok"},
		{"flock wait", bothOpen + "A flock f ex; B> flock f ex wait; A flock f un; B<", "ok, ok, ok, ok, ok"},
		{"flock through a descriptor for reading", "A open f p; B openr f p; B flock f ex; A flock f sh", "ok, ok, ok, EAGAIN"},
		{"flock and posix do not meet", bothOpen + "A flock f ex; B posix f w 0 0", "ok, ok, ok, ok"},
		{"flock of an unlinked file", bothOpen + "A flock f ex; B flock f sh", "ok, ok, ok, EAGAIN"},
	}...)
}()

func lockChecks() []check {
	var out []check
	for _, s := range lockScripts {
		out = append(out, check{"lock: " + s.name, s.want, func(w world) any {
			w.file("p", "0123456789")
			return runLocks(map[byte]world{'A': w, 'B': w}, s.steps)
		}})
	}
	return out
}

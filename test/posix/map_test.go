package posix

import (
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// script is an executable that a world's file system can run by itself: a copy of a small program.
func (w world) program(p string) string {
	w.file(p, read("/bin/true"))
	try(unix.Chmod(w.at(p), 0o755))
	return w.at(p)
}

func mapChecks() []check {
	var out []check
	// What may be mapped how, by what the file was opened for; whether access goes well is tried in a process of its own.
	for _, access := range accesses {
		for _, sharing := range []flagSet{{"MAP_SHARED", unix.MAP_SHARED}, {"MAP_PRIVATE", unix.MAP_PRIVATE}, {"MAP_SHARED_VALIDATE", unix.MAP_SHARED_VALIDATE}} {
			for _, prot := range []flagSet{{"PROT_READ", unix.PROT_READ}, {"PROT_WRITE", unix.PROT_WRITE}, {"PROT_READ|PROT_WRITE", unix.PROT_READ | unix.PROT_WRITE}, {"PROT_READ|PROT_EXEC", unix.PROT_READ | unix.PROT_EXEC}} {
				want := "ok"
				if access.flags == unix.O_WRONLY || access.flags == unix.O_RDONLY && sharing.flags != unix.MAP_PRIVATE && prot.flags&unix.PROT_WRITE != 0 {
					want = "EACCES"
				}
				out = append(out, check{fmt.Sprintf("mmap %s %s of %s", sharing.name, prot.name, access.name), want, func(w world) any {
					fd := opened(w.file("f", "mapped"), access.flags)
					defer unix.Close(fd)
					m, err := unix.Mmap(fd, 0, 6, prot.flags, sharing.flags)
					if err == nil {
						err = unix.Munmap(m)
					}
					return err
				}})
			}
		}
	}
	for _, name := range []struct{ name, want string }{
		{"shared store is seen by read", "Mapped"},
		{"private store is not seen by read", "mapped"},
		{"shared store is there after munmap", "Mapped"},
		{"shared store is there after close and reopen", "Mapped"},
		{"write is seen in a shared mapping", "Written"},
		{"two shared mappings are one", "M"},
		{"shared mapping of 3 MiB, stored all over", "true"},
		{"mapping outlives its descriptor", "mapped"},
		{"mapping outlives its name", "mapped"},
		{"access beyond the end", "SIGBUS"},
		{"access after truncation", "SIGBUS"},
		{"rest of the last page is zero", "0"},
		{"store in the rest of the last page is not in the file", "6"},
		{"fork shares a shared mapping", "C"},
		{"mapping at an offset", "true"},
		{"mapping at an odd offset", "EINVAL"},
		{"mapping of length 0", "EINVAL"},
		{"mapping of a directory", "ENODEV"},
		{"msync MS_ASYNC", "ok"},
		{"msync of what is not mapped", "ENOMEM"},
		{"madvise MADV_DONTNEED keeps shared stores", "M"},
		{"store and then pread through O_DIRECT", "Mapped"},
		{"store and then fallocate punch", "0"},
		{"mmap moves mtime", "true"},
		{"mremap longer", "true"},
		{"mlock", "ok"},
	} {
		out = append(out, check{"map: " + name.name, name.want, func(w world) any {
			w.file("f", "mapped")
			return inChild("map", string(w), name.name)
		}})
	}
	return append(out, []check{
		{"exec from here", "ok", func(w world) any { return exec.Command(w.program("true")).Run() }},
		{"exec of a script", "hello", func(w world) any {
			w.file("s", "#!/bin/sh\necho -n hello\n")
			try(unix.Chmod(w.at("s"), 0o755))
			return must(exec.Command(w.at("s")).Output())
		}},
		{"exec without x", "EACCES", func(w world) any {
			w.file("s", "#!/bin/sh\n")
			return exec.Command(w.at("s")).Run()
		}},
		{"exec of a directory", "EACCES", func(w world) any { return execve(w.dir("d")) }},
		{"exec of what is no program", "ENOEXEC", func(w world) any {
			w.file("s", "neither")
			try(unix.Chmod(w.at("s"), 0o755))
			return execve(w.at("s"))
		}},
		{"exec of a missing file", "ENOENT", func(w world) any { return execve(w.at("no")) }},
		{"exec by a user with x only", "ok", func(w world) any {
			p := w.program("true")
			try(unix.Chmod(p, 0o711))
			return as(cred{uid: 1001, gid: 1001}, func() any { return execve(p) })
		}},
		{"exec by a user without x", "EACCES", func(w world) any {
			p := w.program("true")
			try(unix.Chmod(p, 0o744))
			return as(cred{uid: 1001, gid: 1001}, func() any { return execve(p) })
		}},
		{"exec of a set-user-ID program", "1002", func(w world) any {
			w.file("id", read(must(exec.LookPath("id"))))
			try(unix.Chown(w.at("id"), 1002, 1002))
			try(unix.Chmod(w.at("id"), 0o4755))
			return as(cred{uid: 1001, gid: 1001}, func() any {
				b, err := exec.Command(w.at("id"), "-u").Output()
				if err != nil {
					return err
				}
				return string(b[:len(b)-1])
			})
		}},
		{"exec of a set-group-ID program", "1002", func(w world) any {
			w.file("id", read(must(exec.LookPath("id"))))
			try(unix.Chown(w.at("id"), 1002, 1002))
			try(unix.Chmod(w.at("id"), 0o2755))
			return as(cred{uid: 1001, gid: 1001}, func() any {
				b, err := exec.Command(w.at("id"), "-g").Output()
				if err != nil {
					return err
				}
				return string(b[:len(b)-1])
			})
		}},
		{"fexecve", "ok", func(w world) any {
			fd := opened(w.program("true"), unix.O_RDONLY)
			defer unix.Close(fd)
			return exec.Command(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)).Run()
		}},
		{"open of a running program for writing", "ETXTBSY", func(w world) any {
			return running(w, func(p string) error { return open(p, unix.O_WRONLY) })
		}},
		{"truncate of a running program", "ETXTBSY", func(w world) any {
			return running(w, func(p string) error { return unix.Truncate(p, 0) })
		}},
		{"unlink of a running program", "ok", func(w world) any { return running(w, unix.Unlink) }},
		{"rename over a running program", "ok", func(w world) any {
			w.file("new", "")
			return running(w, func(p string) error { return unix.Rename(w.at("new"), p) })
		}},
		{"exec of what is open for writing", "ETXTBSY", func(w world) any {
			p := w.program("true")
			fd := opened(p, unix.O_WRONLY)
			defer unix.Close(fd)
			return execve(p)
		}},
		{"exec after the writer has closed", "ok", func(w world) any {
			p := w.program("true")
			unix.Close(opened(p, unix.O_WRONLY))
			return execve(p)
		}},
	}...)
}

// execve runs a program, without looking at it first as exec.Command does.
func execve(path string) error {
	p, err := os.StartProcess(path, []string{path}, &os.ProcAttr{})
	if err != nil {
		return err
	}
	state, err := p.Wait()
	if err == nil && !state.Success() {
		return fmt.Errorf("it ended with %v", state)
	}
	return err
}

// running does something to a program that runs.
func running(w world, f func(p string) error) any {
	w.file("sleep", read(must(exec.LookPath("sleep"))))
	try(unix.Chmod(w.at("sleep"), 0o755))
	cmd := exec.Command(w.at("sleep"), "60")
	try(cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	return f(w.at("sleep"))
}

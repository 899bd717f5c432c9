// Package porttest finds TCP ports for servers that tests and benchmarks end and start again where they were.
package porttest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"syscall"
	"testing"
)

// Ports are from below the range from which the kernel takes those of outgoing connections (32768 to 60999 unless ip_local_port_range says
// otherwise): while its server is down, a port of that range, such as port 0 stands for, may become a connection's. Processes take them in
// blocks: the one that listens at the first port of a block has the others.
const (
	host      = "127.0.0.1"
	first     = 10_000
	blocks    = 350
	blockSize = 64
)

var (
	mu     sync.Mutex
	owned  []net.Listener // at the first ports of this process's blocks, until it ends
	unused []int          // ports of the last of these
)

// Addr returns a loopback address HOST:PORT where nobody listens, and that no other call here or in another running process returns.
func Addr() (string, error) {
	mu.Lock()
	defer mu.Unlock()
	for {
		if len(unused) == 0 {
			if err := takeBlock(); err != nil {
				return "", err
			}
		}
		addr := net.JoinHostPort(host, strconv.Itoa(unused[0]))
		unused = unused[1:]
		l, err := net.Listen("tcp", addr)
		if err == nil {
			return addr, l.Close()
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return "", err
		}
	}
}

// For is Addr for a test, which it ends if there is none.
func For(t testing.TB) string {
	t.Helper()
	addr, err := Addr()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

func takeBlock() error {
	for _, i := range rand.Perm(blocks) {
		port := first + i*blockSize
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			continue
		}
		owned = append(owned, l)
		for p := port + 1; p < port+blockSize; p++ {
			unused = append(unused, p)
		}
		return nil
	}
	return fmt.Errorf("no ports: somebody listens at the first of each %d from %d", blockSize, first)
}

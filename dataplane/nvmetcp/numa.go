package nvmetcp

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// machine is the memory nodes of this host.
type machine struct {
	nodes     int     // the highest number of one, and 1
	distances [][]int // as the firmware tells; 10 is near
}

// near is the distance of a node from itself, and of a path that belongs to none.
const near = 10

// topology reads /sys once. A machine without it, or with one node, has one.
var topology = sync.OnceValue(func() *machine { return readMachine("/sys/devices/system/node") })

func readMachine(dir string) *machine {
	m := &machine{nodes: 1}
	for i := 0; ; i++ {
		b, err := os.ReadFile(fmt.Sprintf("%s/node%d/distance", dir, i))
		if err != nil {
			break // nodes with a gap between their numbers are not worth more
		}
		var row []int
		for _, f := range strings.Fields(string(b)) {
			d, _ := strconv.Atoi(f)
			row = append(row, d)
		}
		m.distances = append(m.distances, row)
		m.nodes = i + 1
	}
	return m
}

// distance from node a to node b, either of them -1 if there is none.
func (m *machine) distance(a, b int) int {
	if a < 0 || b < 0 || a >= len(m.distances) || b >= len(m.distances[a]) {
		return near
	}
	return m.distances[a][b]
}

// here is the memory node of the processor that asks.
func (m *machine) here() int {
	if m.nodes == 1 {
		return 0
	}
	var node uint32
	if _, _, e := unix.RawSyscall(unix.SYS_GETCPU, 0, uintptr(unsafe.Pointer(&node)), 0); e != 0 || int(node) >= m.nodes {
		return 0
	}
	return int(node)
}

// nodeOf is the memory node of the network interface through which addr is reached, or -1.
func nodeOf(addr string) int {
	c, err := net.Dial("udp", addr) // only asks the kernel for the route
	if err != nil {
		return -1
	}
	defer c.Close()
	local, ok := c.LocalAddr().(*net.UDPAddr)
	if !ok {
		return -1
	}
	links, err := net.Interfaces()
	if err != nil {
		return -1
	}
	for _, link := range links {
		addrs, _ := link.Addrs()
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.Equal(local.IP) {
				b, err := os.ReadFile("/sys/class/net/" + link.Name + "/device/numa_node")
				if err != nil {
					return -1
				}
				node, err := strconv.Atoi(strings.TrimSpace(string(b)))
				if err != nil {
					return -1
				}
				return node
			}
		}
	}
	return -1
}

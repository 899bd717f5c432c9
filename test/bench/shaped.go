package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	dataserver "github.com/weftfs/weft/server/data"
)

// dataCommand makes this program serve directories as data servers that are slower than they could be:
// serve-data [DELAY RATE CONNECTION-RATE DIR]... It writes their addresses, in a line, to its standard output.
const dataCommand = "serve-data"

// shape is what is done to a server's connections.
type shape struct {
	delay    time.Duration // of every reply
	rate     float64       // of a server, bytes per second of both directions together; 0: no bound
	connRate float64       // of each connection
}

func (s shape) args() []string {
	return []string{s.delay.String(), fmt.Sprint(s.rate), fmt.Sprint(s.connRate)}
}

func serveData(args []string) error {
	runtime.GOMAXPROCS(32) // a thread that sleeps in a system call keeps its processor from others for some time
	if len(args) == 0 || len(args)%4 != 0 {
		return fmt.Errorf("%s takes DELAY RATE CONNECTION-RATE DIR of each server", dataCommand)
	}
	var servers []*dataserver.Server
	var addrs []string
	for one := range slices.Chunk(args, 4) {
		var s shape
		var err error
		if s.delay, err = time.ParseDuration(one[0]); err != nil {
			return err
		}
		if s.rate, err = strconv.ParseFloat(one[1], 64); err != nil {
			return err
		}
		if s.connRate, err = strconv.ParseFloat(one[2], 64); err != nil {
			return err
		}
		server, err := dataserver.Open(dataserver.Config{Dir: one[3], Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		servers, addrs = append(servers, server), append(addrs, l.Addr().String())
		go server.Serve(&shapedListener{l, s, newBucket(s.rate)}) // ends with Shutdown
	}
	fmt.Println(strings.Join(addrs, " "))
	awaitTerm()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for _, s := range servers {
		s.Shutdown(ctx)
	}
	return nil
}

func awaitTerm() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	<-stop
}

// bucketDepth is for how long a bucket collects what is not taken: sleepers wake up late on a busy machine.
const bucketDepth = 50 * time.Millisecond

// bucket lets so many bytes a second pass. A nil one lets everything.
type bucket struct {
	rate float64
	mu   sync.Mutex
	next time.Time // when what was taken has passed
}

func newBucket(rate float64) *bucket {
	if rate == 0 {
		return nil
	}
	return &bucket{rate: rate}
}

// take waits until n bytes more may pass.
func (b *bucket) take(n int) {
	if b == nil {
		return
	}
	b.mu.Lock()
	if least := time.Now().Add(-bucketDepth); b.next.Before(least) {
		b.next = least
	}
	b.next = b.next.Add(time.Duration(float64(n) / b.rate * 1e9))
	until := b.next
	b.mu.Unlock()
	sleepUntil(until)
}

// sleepUntil is more exact than time.Sleep, which waits for whole milliseconds when nothing else runs.
func sleepUntil(t time.Time) {
	for d := time.Until(t); d > 0; d = time.Until(t) {
		ts := unix.NsecToTimespec(int64(d))
		unix.Nanosleep(&ts, nil)
	}
}

type shapedListener struct {
	net.Listener
	shape  shape
	server *bucket
}

func (l *shapedListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &shapedConn{Conn: nc, shape: l.shape, server: l.server, own: newBucket(l.shape.connRate)}
	if l.shape.delay > 0 {
		c.queue, c.closed = make(chan delayed, 1024), make(chan struct{})
		go c.pump() // ends with the connection
	}
	return c, nil
}

// shapedConn is a server's end of a connection.
type shapedConn struct {
	net.Conn
	shape       shape
	server, own *bucket
	queue       chan delayed
	closed      chan struct{}
	once        sync.Once
}

type delayed struct {
	b   []byte
	due time.Time
}

// shapeStep is how much passes at once, in bytes.
const shapeStep = 64 << 10

func (c *shapedConn) Read(b []byte) (int, error) {
	if c.server != nil || c.own != nil {
		b = b[:min(len(b), shapeStep)]
	}
	n, err := c.Conn.Read(b)
	c.server.take(n)
	c.own.take(n)
	return n, err
}

func (c *shapedConn) Write(b []byte) (int, error) {
	if c.queue == nil {
		return c.write(b)
	}
	select {
	case c.queue <- delayed{append([]byte(nil), b...), time.Now().Add(c.shape.delay)}:
		return len(b), nil
	case <-c.closed:
		return 0, net.ErrClosed
	}
}

func (c *shapedConn) write(b []byte) (n int, err error) {
	if c.server == nil && c.own == nil {
		return c.Conn.Write(b)
	}
	for n < len(b) && err == nil {
		step := b[n:min(n+shapeStep, len(b))]
		c.server.take(len(step))
		c.own.take(len(step))
		var m int
		m, err = c.Conn.Write(step)
		n += m
	}
	return n, err
}

func (c *shapedConn) pump() {
	for {
		select {
		case d := <-c.queue:
			sleepUntil(d.due)
			if _, err := c.write(d.b); err != nil {
				c.Close()
			}
		case <-c.closed:
			return
		}
	}
}

func (c *shapedConn) Close() error {
	if c.closed != nil {
		c.once.Do(func() { close(c.closed) })
	}
	return c.Conn.Close()
}

// filesCommand makes this program serve files in the simplest way: serve-files FILE... It writes an address for each, in a
// line, to its standard output.
const filesCommand = "serve-files"

// A request to it is 16 bytes, in little endian: what (0 to read, 1 to write), the length, and the offset, with the bytes
// to write behind it. The reply is the length in 8 bytes, with the bytes read behind it.
const filesHead = 16

func serveFiles(args []string) error {
	var addrs []string
	for _, path := range args {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		addrs = append(addrs, l.Addr().String())
		go func() { // one file's; ends with the process
			for {
				nc, err := l.Accept()
				if err != nil {
					return
				}
				go serveFile(nc, f) // ends with the connection
			}
		}()
	}
	fmt.Println(strings.Join(addrs, " "))
	awaitTerm()
	return nil
}

func serveFile(nc net.Conn, f *os.File) {
	defer nc.Close()
	var head [filesHead]byte
	buf := make([]byte, 4<<20)
	for {
		if _, err := io.ReadFull(nc, head[:]); err != nil {
			return
		}
		b := buf[:binary.LittleEndian.Uint32(head[4:])]
		off := int64(binary.LittleEndian.Uint64(head[8:]))
		reply := net.Buffers{head[:8]}
		if binary.LittleEndian.Uint32(head[:]) == 1 {
			if _, err := io.ReadFull(nc, b); err != nil {
				return
			}
			if _, err := f.WriteAt(b, off); err != nil {
				return
			}
		} else {
			if _, err := f.ReadAt(b, off); err != nil {
				return
			}
			reply = append(reply, b)
		}
		binary.LittleEndian.PutUint64(head[:], uint64(len(b)))
		if _, err := reply.WriteTo(nc); err != nil {
			return
		}
	}
}

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

const (
	greedyAddress  = "127.0.0.5"
	greedySessions = 8
	greedyCallers  = 16 // of each session
	greedyOps      = 500
)

// neighbour measures creates by one worker of a mount while another client creates as many files as it gets, from 8 sessions with 16 callers each: with a rule
// that lets that one have 500 operations a second, without the other client, and without the rule.
func neighbour(l *lab) (f figures, err error) {
	v, err := l.volume(l.disk)
	if err != nil {
		return f, err
	}
	return f, v.use(func(dir string) error {
		one := func(name string) (float64, error) {
			sub := filepath.Join(dir, name)
			if err := os.Mkdir(sub, 0o755); err != nil {
				return 0, err
			}
			return rate(sub, 1, 1, create)
		}
		if f.baseline, err = one("alone"); err != nil {
			return err
		}
		end, err := greedy(v.addr)
		if err != nil {
			return err
		}
		if f.disk, err = one("unbounded"); err == nil {
			for _, rule := range []string{"127.0.0.0/8(rw,no_root_squash)", fmt.Sprintf("%s(rw,no_root_squash,ops=%d)", greedyAddress, greedyOps)} {
				out, e := exec.Command(filepath.Join(l.bin, "weft"), "admin", "client", "set", "--server", v.addr, rule).CombinedOutput()
				if e != nil {
					err = errors.Join(err, fmt.Errorf("weft admin client set: %w: %s", e, out))
				}
			}
			time.Sleep(time.Second) // what is under way
		}
		if err == nil {
			f.weft, err = one("bounded")
		}
		return errors.Join(err, end())
	})
}

// greedy begins a client that does as much as it can, until its end. The service sees it at another address.
func greedy(addr string) (end func() error, err error) {
	relay, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() { // ends with the listener
		for {
			near, err := relay.Accept()
			if err != nil {
				return
			}
			far, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(greedyAddress)}}).Dial("tcp", addr)
			if err != nil {
				near.Close()
				continue
			}
			for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
				go func() { // ends with either connection
					io.Copy(way[0], way[1])
					near.Close()
					far.Close()
				}()
			}
		}
	}()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	var clients []*metaclient.Volume
	end = func() (err error) {
		cancel()
		all.Wait()
		for _, c := range clients {
			err = errors.Join(err, c.Close(context.Background()))
		}
		return errors.Join(err, relay.Close())
	}
	cred := metarpc.Cred{}
	for i := range greedySessions {
		info := metarpc.ClientInfo{Host: "greedy", PID: os.Getpid(), Program: "bench", Mount: fmt.Sprint("session ", i)}
		rand.Read(info.ID[:])
		c, err := metaclient.Dial(ctx, metaclient.Config{Addrs: []string{relay.Addr().String()}, Client: info, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return nil, errors.Join(err, end())
		}
		clients = append(clients, c)
		d, err := c.MakeNode(ctx, cred, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: fmt.Sprint("greedy", i), Mode: syscall.S_IFDIR | 0o755})
		if err != nil {
			return nil, errors.Join(err, end())
		}
		for j := range greedyCallers {
			all.Go(func() { // ends with ctx
				for n := 0; ctx.Err() == nil; n++ {
					a, _, err := c.Create(ctx, cred, &metarpc.CreateArgs{Parent: d.Attr.ID, Name: fmt.Sprint(j, "-", n), Mode: 0o644, Exclusive: true})
					if err == nil {
						c.Release(a.Attr.ID)
					}
				}
			})
		}
	}
	return end, nil
}

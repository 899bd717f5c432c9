package etcdserver_test

import (
	"testing"

	"github.com/weftfs/weft/server/catalog/catalogtest/etcdserver"
)

// TestCluster goes once through what can be done to members.
func TestCluster(t *testing.T) {
	c := etcdserver.Start(t, 3)
	lead := c.Leader()
	c.Kill(lead)
	next := c.Leader()
	if next == lead {
		t.Errorf("member %d leads after it was killed", lead)
	}
	c.Restart(lead)
	c.Stop(next)
	c.Cont(next)
	for i := range 3 {
		c.Kill(i)
	}
	c.RestartAll()
	c.Leader()
}

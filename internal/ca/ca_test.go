package ca_test

import (
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/ca"
)

// TestCA: what a CA makes and takes back, and what it does not make.
func TestCA(t *testing.T) {
	dir := t.TempDir()
	if _, err := ca.Open(dir); err == nil || !strings.Contains(err.Error(), "weftd ca init") {
		t.Errorf("no CA: %v", err)
	}
	if _, err := ca.Init(dir, "ours"); err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Init(dir, "ours"); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("a second CA: %v", err)
	}
	c, err := ca.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []ca.Subject{
		{Name: "", Life: time.Hour}, {Name: "../x", Life: time.Hour}, {Name: "x"}, {Name: "x", Life: 1e6 * time.Hour},
		{Name: "x", Service: true, Life: time.Hour}, {Name: "x", Hosts: []string{"h"}, Life: time.Hour},
		{Name: "x", Service: true, Hosts: []string{"h:1"}, Life: time.Hour},
	} {
		if _, _, err := c.Issue(s); err == nil {
			t.Errorf("a certificate for %+v", s)
		}
	}
	cert, _, err := c.Issue(ca.Subject{Name: "a", Service: true, Hosts: []string{"h", "10.0.0.1"}, Life: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Renew(cert, 2*time.Hour); err != nil {
		t.Error(err)
	}
	list, err := c.List()
	if err != nil || len(list) != 2 || list[1].DNSNames[0] != "h" || list[1].IPAddresses[0].String() != "10.0.0.1" {
		t.Errorf("%v, %v", list, err)
	}
	for _, want := range []int{2, 0} { // the second time there is nothing left to revoke
		if done, err := c.Revoke("a"); err != nil || len(done) != want {
			t.Errorf("%d revoked, %v; want %d", len(done), err, want)
		}
	}
	if _, err := c.Renew(cert, time.Hour); err == nil || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("renewed although it is revoked: %v", err)
	}
	if _, err := c.Revoke("b"); err == nil || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("revoked what there is not: %v", err)
	}
	other, err := ca.Init(t.TempDir(), "another")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Renew(cert, time.Hour); err == nil || !strings.Contains(err.Error(), "not of this CA") {
		t.Errorf("renewed by another CA: %v", err)
	}
}

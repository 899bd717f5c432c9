package main

import (
	"strings"
	"testing"
	"time"
)

// The bar, before and after all is found, and when there is nothing to do.
func TestCacheBar(t *testing.T) {
	for _, c := range []struct {
		t    *cacheTally
		want string
	}{
		{&cacheTally{}, "[>                   ]   0%  0 B of 0 B+, 0 of 0 files"},
		{&cacheTally{found: 10, done: 2, total: 4 << 30, passed: 1 << 30}, "[=====>              ]  25%  1.0 GiB of 4.0 GiB+, 2 of 10 files"},
		{&cacheTally{found: 10, done: 10, total: 4 << 30, passed: 4 << 30, all: true}, "[====================] 100%  4.0 GiB of 4.0 GiB, 10 of 10 files"},
	} {
		if got := c.t.String(); !strings.HasPrefix(got, c.want) {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	half := cacheTally{began: time.Now().Add(-10 * time.Second), found: 2, done: 1, total: 2000, passed: 1000, all: true}
	if got := half.String(); !strings.HasSuffix(got, ", 100 B/s, 10s left") && !strings.HasSuffix(got, ", 99 B/s, 10s left") {
		t.Errorf("%q", got)
	}
}

package main

import (
	"strings"
	"testing"

	"github.com/weftfs/weft/fs"
)

func TestTransportOption(t *testing.T) {
	for list, want := range map[string]fs.Transport{
		"": fs.GoFuse, "transport=gofuse": fs.GoFuse, "transport=device": fs.DeviceLoop, "transport=device,transport=gofuse": fs.GoFuse,
	} {
		if o, err := parseOptions([]string{list}); err != nil || o.transport != want {
			t.Errorf("%q: %v, %v; want %v", list, o.transport, err, want)
		}
	}
	if _, err := parseOptions([]string{"transport=fuse"}); err == nil || !strings.Contains(err.Error(), "gofuse or device") {
		t.Errorf("transport=fuse: %v", err)
	}
}

// Package nvmetest has NVMe targets that tests change while they serve.
package nvmetest

import "github.com/weftfs/weft/server/nvme"

// Target is a target with its controls.
type Target struct {
	*nvme.Target
	nvme.Control
}

// New is nvme.New.
func New(cfg nvme.Config) (*Target, error) {
	t := new(Target)
	cfg.Control = func(c nvme.Control) { t.Control = c }
	var err error
	t.Target, err = nvme.New(cfg)
	return t, err
}

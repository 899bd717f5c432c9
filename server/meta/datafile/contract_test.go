package datafile_test

import (
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/meta/datafile"
)

var _ meta.Files = (*datafile.Manager)(nil)

package datafile_test

import (
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/meta"
)

var _ meta.Files = (*datafile.Manager)(nil)

package memorytest_test

import (
	"testing"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/memorytest"
)

func TestContract(t *testing.T) {
	catalogtest.Run(t, func(*testing.T) catalog.Engine { return memorytest.New() })
}

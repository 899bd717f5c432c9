//go:build race

package iobuf

// reserve takes the memory from the heap: the race detector does not watch mappings.
func reserve(_ *Pool, n int64) ([]byte, error) {
	return Aligned(int(n)), nil
}

func giveBack(mem []byte) { clear(mem) }

func poison(mem []byte) {
	if len(mem) == 0 {
		return
	}
	mem[0] = 0xdb
	for n := 1; n < len(mem); n *= 2 {
		copy(mem[n:], mem[:n])
	}
}

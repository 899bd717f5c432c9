// Package oncrpctest makes records for tests.
package oncrpctest

import "github.com/weftfs/weft/internal/wire/oncrpc"

// AppendRecordMark appends the mark that PutRecordMark writes.
func AppendRecordMark(b []byte, n int, last bool) []byte {
	b = append(b, 0, 0, 0, 0)
	oncrpc.PutRecordMark(b[len(b)-oncrpc.RecordMarkSize:], n, last)
	return b
}

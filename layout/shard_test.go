package layout

import "testing"

func TestShardOf(t *testing.T) {
	for _, c := range []struct {
		id     FileID
		shards int
		want   int
	}{
		{RootID, 1, 0}, {RootID, 16, 0}, {ShardChunk - 1, 16, 0}, {ShardChunk, 16, 1}, {16*ShardChunk - 1, 16, 15},
		{16 * ShardChunk, 16, 0}, {1<<64 - 1, 16, 15}, {1<<64 - 1, 1, 0},
	} {
		if got := ShardOf(c.id, c.shards); got != c.want {
			t.Errorf("ShardOf(%d, %d) = %d, want %d", c.id, c.shards, got, c.want)
		}
	}
}

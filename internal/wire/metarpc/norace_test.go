//go:build !race

package metarpc

const raceEnabled = false

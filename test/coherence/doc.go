// Package coherence has several mounts of one volume: what is done through one is seen through the others at once, nobody
// waits for ever, and a client that was stopped does no harm. Run more with
//
//	go test ./test/coherence -args -long
//	go test ./test/coherence -run Pairs -args -pairs 10000 -seed 1 -o cache=lease
package coherence

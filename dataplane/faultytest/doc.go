// Package faultytest wraps a dataplane.Target so that it fails on demand: errors with and without effect at the server, delays,
// transfers cut short, replies less stable than asked, requests in another order, restarts at chosen moments.
//
// Faults follow from rules and a seed, so a failing test can be run again: the choices depend only on the seed and on the
// order in which requests are started. The wrapper keeps the contract of Target (targettest passes over it); it is for
// tests and allocates freely.
//
// Locks: entry.mu, then Target.mu. entry.mu is held while the wrapped target's Start and Detach run.
package faultytest

// Package locks tests that file locks hold between two mounts of one volume, and what becomes of them when the service or
// a mount dies.
package locks

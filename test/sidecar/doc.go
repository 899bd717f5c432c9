// Package sidecar has tests of a mount in the foreground as process 1 of a container.
package sidecar

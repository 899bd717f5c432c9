// Package arrows holds who may import whom. An arrow that is not here yet is a decision: make it here.
package arrows

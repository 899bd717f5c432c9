// Package commands has tests of commands that look at whole mounts, weft bench and weft doctor, and of what commands
// say of mistakes.
package commands

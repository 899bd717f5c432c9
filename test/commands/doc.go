// Package commands has tests of commands that look at whole mounts: weft bench and weft doctor.
package commands

// Package faults breaks weft on purpose and checks that nothing acknowledged is lost and nothing is left behind.
package faults

// Package house holds who may import whom, and how large and entangled the code may be. An arrow that is not here yet is a
// decision: make it here. So is a higher budget.
package house

// Package training runs the examples of docs/training.md on a mount.
package training

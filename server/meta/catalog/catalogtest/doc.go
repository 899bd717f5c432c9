// Package catalogtest is the behaviour that every catalog engine shares, as a test suite.
//
// Run is for every engine, RunReopen for those that keep their contents when closed. The suite uses nothing but the
// catalog interface, expects ErrConflict wherever it may come, and splits nothing by constants of an engine.
package catalogtest

// Package catalogtest is the behaviour that every catalog engine shares, as a test suite.
//
// Run is for every engine, RunReopen for those that keep their contents when closed. The suite uses nothing but the
// catalog interface, expects ErrConflict wherever it may come, and splits nothing by constants of an engine. ErrUnknown is
// a failure to it: engines that give it are wrapped by Resolve first. Spread makes one engine of several handles on one
// catalog, so that the suite tells whether they agree. RunExpiry walks over snapshots that may expire.
package catalogtest

// Package manual writes what the tables of commands and options of a program say as manual pages (man(7)) and as completions for shells. The
// tables also make the parser and --help, so that all of them say the same.
package manual

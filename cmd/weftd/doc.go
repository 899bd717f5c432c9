// Command weftd is the server side of weft: a metadata service, a data server, or both on one machine, and the checker
// of what they keep. It parses flags and wires the parts together.
package main

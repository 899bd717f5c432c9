// Command weftd is the server side of weft: a metadata service, a data server, or both on one machine, and the tools for what they keep: a
// checker, and what copies catalogs. It parses flags and wires the parts together.
package main

// Package cache tests copies of files on a data server of the reader's host: what weft prefetch and its relatives make, who sees what is
// written meanwhile, and what is left when something dies.
package cache

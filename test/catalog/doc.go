// Package catalog tests weftd's tools on catalogs with whole systems: a check of a volume in use, backups, and the way of a volume from one
// catalog to another.
package catalog

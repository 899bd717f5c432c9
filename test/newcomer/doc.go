// Package newcomer does what the README says, word by word: from a fresh clone to a first file, and to two clients with certificates on hosts of
// their own, which are network and mount namespaces here.
package newcomer

// Package etcdserver starts clusters of real etcd members for tests: the program etcd in PATH (Debian's package etcd-server), in a
// directory of the test's, on addresses that nobody else uses. Members can be killed, stopped, continued and restarted. They
// end with the test, also if it is killed.
package etcdserver

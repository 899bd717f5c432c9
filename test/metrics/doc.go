// Package metrics has tests of what serving processes tell over HTTP, with a real Prometheus: metrics, health, alerts, and the queries of the dashboard.
package metrics

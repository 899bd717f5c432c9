// Package admit decides who is let in to a metadata service, and as whom.
//
// A [Door] takes connections, in clear text and TLS, reads the first frame of each, and bounds how many there are of
// one address. [Rules] say what a client may do, by its address or the name in its certificate, in the manner of
// exports(5); of these an [Export] makes the user on whose behalf a call is executed out of the credential that came
// with it, and [Meters] bound how often clients call. The package knows neither sessions nor the catalog.
//
// The mutexes of Door, Groups and Meters are taken alone.
package admit

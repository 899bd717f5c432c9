package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/ca"
	"github.com/weftfs/weft/internal/rpctls"
)

func caDirFlag(fl *pflag.FlagSet) *string {
	return fl.String("dir", "", "directory of the certificate authority, whose key is nobody else's")
}

func lifeFlag(fl *pflag.FlagSet) *time.Duration {
	return fl.Duration("life", ca.DefaultLife, "how long the certificate is good")
}

func runCAInit(_ context.Context, c *command, args []string) error {
	fl := c.Flags("")
	dir := caDirFlag(fl)
	name := fl.String("name", "weft-ca", "its name")
	if err := parse(c, fl, args, "dir"); err != nil {
		return err
	}
	_, err := ca.Init(*dir, *name)
	return err
}

func runCAIssue(_ context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe directory of --out gets " + rpctls.CAFile + ", " + rpctls.CertFile + " and " + rpctls.KeyFile + ".\n")
	dir := caDirFlag(fl)
	name := fl.String("name", "", "who the certificate is for")
	hosts := fl.StringArray("host", nil, "name or IP address by which a service is reached (may be repeated); data servers are reached by address")
	out := fl.String("out", "", "directory for the certificate and its key, made if missing")
	life := lifeFlag(fl)
	if err := parse(c, fl, args, "dir", "name", "out"); err != nil {
		return err
	}
	authority, err := ca.Open(*dir)
	if err != nil {
		return err
	}
	cert, key, err := authority.Issue(ca.Subject{Name: *name, Service: len(*hosts) > 0, Hosts: *hosts, Life: *life})
	if err != nil {
		return err
	}
	root, err := os.ReadFile(rpctls.Dir(*dir).CA)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	f := rpctls.Dir(*out)
	return errors.Join(ca.Write(f.Key, key, 0o600), ca.Write(f.Cert, cert, 0o644), ca.Write(f.CA, root, 0o644))
}

func runCARenew(_ context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe key stays. Servers and mounts read the files again by themselves.\n")
	dir := caDirFlag(fl)
	out := fl.String("out", "", "directory of the certificate, as ca issue made it")
	life := lifeFlag(fl)
	if err := parse(c, fl, args, "dir", "out"); err != nil {
		return err
	}
	authority, err := ca.Open(*dir)
	if err != nil {
		return err
	}
	name := rpctls.Dir(*out).Cert
	old, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	cert, err := authority.Renew(old, *life)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return ca.Write(name, cert, 0o644)
}

func runCARevoke(_ context.Context, c *command, args []string) error {
	fl := c.Flags("\nServers go by it as soon as they have DIR/" + rpctls.CRLFile + ", which --tls-crl names and which they read again by themselves.\n")
	dir := caDirFlag(fl)
	name := fl.String("name", "", "name, or serial number as ca ls shows it")
	if err := parse(c, fl, args, "dir", "name"); err != nil {
		return err
	}
	authority, err := ca.Open(*dir)
	if err != nil {
		return err
	}
	done, err := authority.Revoke(*name)
	if err == nil {
		fmt.Printf("%d revoked; servers need %s\n", len(done), rpctls.Dir(*dir).CRL)
	}
	return err
}

func runCAToken(_ context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe host that it is told to runs: weft join HOST[:PORT] --token-file FILE, while weftd ca serve runs here.\n")
	dir := caDirFlag(fl)
	name := fl.String("name", "", "who the certificate is for")
	hosts := fl.StringArray("host", nil, "name or IP address by which a service is reached (may be repeated); data servers are reached by address")
	out := fl.String("out", "", "file for the token, which only its owner can read, in place of standard output")
	good := fl.Duration("good", time.Hour, "how long the token is good")
	life := lifeFlag(fl)
	if err := parse(c, fl, args, "dir", "name"); err != nil {
		return err
	}
	authority, err := ca.Open(*dir)
	if err != nil {
		return err
	}
	token, err := authority.NewToken(ca.Subject{Name: *name, Service: len(*hosts) > 0, Hosts: *hosts, Life: *life}, *good)
	if err != nil {
		return err
	}
	if *out != "" {
		return ca.Write(*out, []byte(token.String()+"\n"), 0o600)
	}
	fmt.Println(token)
	return nil
}

func runCAServe(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nHosts join with a token (weftd ca token) and weft join, and renew their certificates with weft join --renew, which also brings them the list of\n" +
		"those that are revoked. Runs until SIGTERM or SIGINT.\n")
	dir := caDirFlag(fl)
	addr := fl.String("listen", fmt.Sprintf(":%d", ca.DefaultPort), "address HOST:PORT")
	watching := newWatchFlags(fl)
	if err := parse(c, fl, args, "dir"); err != nil {
		return err
	}
	authority, err := ca.Open(*dir)
	if err != nil {
		return err
	}
	log, err := watching.log(c)
	if err != nil {
		return err
	}
	l, err := listen(*addr, strconv.Itoa(ca.DefaultPort))
	if err != nil {
		return err
	}
	var seen watch
	stop, err := seen.serve(watching, log)
	if err != nil {
		l.Close()
		return err
	}
	defer stop()
	log.Info("certificate authority ready", "addr", l.Addr(), "dir", *dir)
	return authority.Serve(ctx, l, log)
}

func runCAList(_ context.Context, c *command, args []string) error {
	fl := c.Flags("")
	dir := caDirFlag(fl)
	if err := parse(c, fl, args, "dir"); err != nil {
		return err
	}
	authority, err := ca.Open(*dir)
	if err != nil {
		return err
	}
	list, err := authority.List()
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tSERIAL\tUNTIL\tSTATE\tHOSTS")
	for _, cert := range list {
		state := "good"
		switch {
		case cert.Revoked:
			state = "revoked"
		case time.Now().After(cert.NotAfter):
			state = "expired"
		}
		hosts := cert.DNSNames
		for _, ip := range cert.IPAddresses {
			hosts = append(hosts, ip.String())
		}
		fmt.Fprintf(w, "%s\t%x\t%s\t%s\t%s\n", cert.Subject.CommonName, cert.SerialNumber, cert.NotAfter.Format(time.RFC3339), state, strings.Join(hosts, " "))
	}
	return w.Flush()
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/ca"
)

func runJoin(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nHOST is where weftd ca serve runs. The key is made here and stays here. With --renew a certificate that is there makes place for one that is good for as long\n" +
		"again, and what is known of revoked ones is brought up to date: let a timer do that. Mounts and services read the files again by themselves.\n")
	file := fl.String("token-file", "", "file with the token that weftd ca token has made, which nobody else can read; - is standard input")
	renew := fl.Bool("renew", false, "renew the certificate that is there")
	dir := fl.String("dir", tlsDir, "directory for ca.pem, cert.pem, key.pem and crl.pem, made if missing")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	addr, err := parseHostPort(fl.Arg(0), strconv.Itoa(ca.DefaultPort))
	if err != nil {
		return usagef("join: %v", err)
	}
	if *renew == (*file != "") {
		return usagef("join: one of --token-file and --renew is needed; usage: weft join %s", c.Args)
	}
	if *renew {
		cert, err := ca.Renew(ctx, addr, *dir)
		if err == nil {
			fmt.Printf("the certificate of %s in %s is good until %s\n", cert.Subject.CommonName, *dir, cert.NotAfter.Format(time.RFC3339))
		}
		return err
	}
	text, err := readToken(*file)
	if err != nil {
		return fmt.Errorf("--token-file: %w", err)
	}
	token, err := ca.ParseToken(text)
	if err != nil {
		return fmt.Errorf("--token-file %s: %w", *file, err)
	}
	cert, err := ca.Join(ctx, addr, token, *dir)
	if err == nil {
		fmt.Printf("this host is %s: its certificate in %s is good until %s\n", cert.Subject.CommonName, *dir, cert.NotAfter.Format(time.RFC3339))
	}
	return err
}

// readToken reads a file that nobody else can read.
func readToken(name string) (string, error) {
	if name == "-" {
		name = "/dev/stdin"
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	var st unix.Stat_t
	if err := unix.Stat(name, &st); err != nil {
		return "", err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o077 != 0 {
		return "", errors.New(name + " can be read by others: chmod 600 " + name)
	}
	return string(b), nil
}

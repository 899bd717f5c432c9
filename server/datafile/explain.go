package datafile

import (
	"context"
	"errors"
	"fmt"

	client "github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/server/datafile/store"
)

// defaultPort is that of NFS by convention.
const defaultPort = 2049

// findPort asks the port mapper for the port of NFSv3 unless the place says it. A host without a port mapper gets the
// usual port.
func findPort(ctx context.Context, at *place) error {
	if at.port != 0 {
		return nil
	}
	at.port = defaultPort
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	addrs, err := store.Resolve(ctx, at.host, client.PortmapPort)
	if err != nil {
		return err
	}
	for _, addr := range addrs {
		port, err := client.Port(ctx, addr.Addr(), oncrpc.ProgNFS, nfs3.Version)
		if missing := (*client.NotRegisteredError)(nil); errors.As(err, &missing) {
			return err
		}
		if err == nil {
			at.port = port
			break
		}
	}
	return nil
}

// advice is what to write into the server's configuration.
func advice(export string) string {
	return fmt.Sprintf("for the kernel's server, in /etc/exports: %s *(rw,no_root_squash,insecure,no_subtree_check), with your hosts for *, and then exportfs -ra; "+
		"for NFS-Ganesha, in EXPORT: Access_Type = RW; Squash = No_Root_Squash; SecType = sys; PrivilegedPort = false; Protocols = 3;", export)
}

// explain adds to an error of adding an export what is the likely reason, and what to do. root says whether connections
// came from reserved ports.
func explain(err error, export string, root bool) error {
	because := func(why string) error { return fmt.Errorf("%w: %s; %s", err, why, advice(export)) }
	var refused *oncrpc.Error
	if errors.As(err, &refused) && refused.Stat == oncrpc.AuthError {
		if refused.AuthStat == oncrpc.AuthTooWeak {
			return because("the server wants more than AUTH_SYS in clear text: TLS (weftd meta --xprtsec), Kerberos, which weft does not have, or a source port below 1024 (PrivilegedPort)")
		}
		return because("the server does not take AUTH_SYS credentials")
	}
	var answer *client.Error
	status, answered := store.Status(err)
	switch {
	case errors.Is(err, store.ErrSquashed):
		return because("the server makes another user of root (root squash), so data files cannot be given to their owners")
	case !answered:
		return err
	case status == nfs3.ErrROFS:
		return because("the export is read-only")
	case status != nfs3.ErrAcces && status != nfs3.ErrPerm:
		return err
	case errors.As(err, &answer) && answer.Op == nfs3.MountProcMnt.String():
		why := "the server does not export that to this host"
		if !root {
			why += ", or not to source ports above 1023, as this process is not root (insecure)"
		}
		return because(why)
	case status == nfs3.ErrPerm && !root:
		return because("the server may want source ports below 1024, and this process is not root (insecure)")
	}
	return because("root may not write there, as the server makes another user of it (root squash) or exports the directory read-only")
}

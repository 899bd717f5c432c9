package postgres

import (
	"errors"
	"io"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weftfs/weft/server/catalog"
)

func TestOutcome(t *testing.T) {
	said := func(severity, code string) error { return &pgconn.PgError{SeverityUnlocalized: severity, Code: code} }
	for _, c := range []struct {
		err       error
		want      error // nil: none of those below
		transient bool
	}{
		{said("ERROR", "40001"), catalog.ErrConflict, false},
		{said("ERROR", "53200"), catalog.ErrConflict, false},
		{said("ERROR", "53100"), catalog.ErrFull, false},
		{notApplied(said("ERROR", "53100")), catalog.ErrFull, false},
		{said("ERROR", "53300"), nil, true},
		{said("ERROR", "42501"), nil, false},
		{said("FATAL", "57P01"), catalog.ErrUnknown, false},
		{io.ErrUnexpectedEOF, catalog.ErrUnknown, false},
		{notApplied(io.ErrUnexpectedEOF), nil, true},
	} {
		err := outcome(c.err)
		for _, is := range []error{catalog.ErrConflict, catalog.ErrFull, catalog.ErrUnknown} {
			if errors.Is(err, is) != (is == c.want) {
				t.Errorf("%v is %v, want %v", c.err, err, c.want)
			}
		}
		if !errors.Is(err, c.err) {
			t.Errorf("%v does not say %v", err, c.err)
		}
		if c.want != catalog.ErrUnknown && c.want != catalog.ErrConflict && transient(err) != c.transient {
			t.Errorf("%v may go better: %v, want %v", err, !c.transient, c.transient)
		}
	}
}

package faultytest

import (
	"bytes"
	"context"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// validator is the wrapped target if it is a dataplane.Validator, else nil.
func (t *Target) validator() dataplane.Validator {
	v, _ := t.inner.(dataplane.Validator)
	return v
}

// Written implements dataplane.Validator.
func (t *Target) Written(df *layout.DataFile) []layout.Range {
	if v := t.validator(); v != nil {
		return v.Written(df)
	}
	return nil
}

// Validated implements dataplane.Validator.
func (t *Target) Validated(df *layout.DataFile, ranges []layout.Range) {
	if v := t.validator(); v != nil {
		v.Validated(df, ranges)
	}
}

// Cut implements dataplane.Validator.
func (t *Target) Cut(df *layout.DataFile, from int64) {
	if v := t.validator(); v != nil {
		v.Cut(df, from)
	}
}

// Forget implements dataplane.Validator.
func (t *Target) Forget(df *layout.DataFile) {
	if v := t.validator(); v != nil {
		v.Forget(df)
	}
}

// Quiesce implements dataplane.Validator. What was not passed on yet ends with ErrQuiesced.
func (t *Target) Quiesce(ctx context.Context, df *layout.DataFile) error {
	t.mu.Lock()
	var open []*entry
	for op, e := range t.entries {
		if bytes.Equal(op.File.Handles[0], df.Handles[0]) {
			open = append(open, e)
		}
	}
	t.mu.Unlock()
	for _, e := range open {
		e.mu.Lock()
		if e.ended || e.passed {
			e.mu.Unlock()
		} else {
			e.finish(ErrQuiesced)
		}
	}
	if v := t.validator(); v != nil {
		return v.Quiesce(ctx, df)
	}
	return nil
}

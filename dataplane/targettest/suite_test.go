package targettest

import (
	"testing"

	"github.com/weftfs/weft/layout"
)

func TestServer(t *testing.T) {
	open := func(t *testing.T) Fixture {
		s := NewServer(1)
		s.Shuffle()
		target := s.NewTarget(64<<10, 48<<10)
		t.Cleanup(func() { target.Close() })
		return Fixture{
			Target:  target,
			NewFile: s.NewFile,
			BadFile: &layout.DataFile{Device: s.ID(), Handles: [][]byte{[]byte("no such file")}},
		}
	}
	Run(t, open)
	RunSparse(t, open)
}

func TestServerRestart(t *testing.T) {
	s := NewServer(2)
	fx := Fixture{Target: s.NewTarget(1<<20, 1<<20), NewFile: s.NewFile}
	t.Cleanup(func() { fx.Target.Close() })
	df := s.NewFile()
	write(t, fx, df, 0, []byte("stable"), layout.DataSync)
	write(t, fx, df, 6, []byte(" committed"), layout.Unstable)
	do(t, fx, layout.Op{Kind: layout.OpCommit, File: df})
	before := write(t, fx, df, 0, []byte("LOST"), layout.Unstable)
	if got := string(s.Contents(df)); got != "LOSTle committed" {
		t.Errorf("contents %q", got)
	}
	s.Restart()
	if got, _ := read(t, fx, df, 0, 100); string(got) != "stable committed" || string(s.Stable(df)) != string(got) {
		t.Errorf("after a restart: %q, stable %q", got, s.Stable(df))
	}
	s.Keep(1)
	after := write(t, fx, df, 0, []byte("kept"), layout.Unstable)
	if before.Verifier == after.Verifier {
		t.Error("the verifier did not change")
	}
	s.Restart()
	if got := string(s.Contents(df)); got != "keptle committed" {
		t.Errorf("contents %q", got)
	}
	s.Truncate(df, 4)
	s.Restart()
	if got := string(s.Contents(df)); got != "kept" {
		t.Errorf("contents %q after truncation", got)
	}
}

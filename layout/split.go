package layout

import "fmt"

// Piece is the part of a file range that goes to one data server in one request.
type Piece struct {
	Server int   // index in every mirror
	Off    int64 // in the file and, mapping being sparse, in the data file
	Data   []byte
}

// Split cuts the file range [off, off+len(p)) into one piece per stripe unit touched, none longer than max bytes.
//
// Pieces come in file order, cover p exactly once and alias it, so p must stay untouched until all requests made of
// them have ended. With one server per mirror, or unit 0, there are no unit boundaries and only max cuts. Split
// allocates only when pieces lacks capacity. A range that leaves the segment gives ErrBeyondSegment and pieces as they
// came.
func (s *Segment) Split(pieces []Piece, p []byte, off int64, max int) ([]Piece, error) {
	if max <= 0 {
		return pieces, fmt.Errorf("split of %d bytes at %d: largest request is %d bytes", len(p), off, max)
	}
	if off < 0 || !s.Contains(off, int64(len(p))) {
		return pieces, fmt.Errorf("%d bytes at %d in %v: %w", len(p), off, s.Range, ErrBeyondSegment)
	}
	w := int64(s.Width())
	for len(p) > 0 {
		n := min(len(p), max)
		server := int64(0)
		if w > 1 && s.StripeUnit > 0 {
			unit := off / s.StripeUnit
			server = unit % w
			if left := s.StripeUnit - off%s.StripeUnit; int64(n) > left {
				n = int(left)
			}
		}
		pieces = append(pieces, Piece{Server: int(server), Off: off, Data: p[:n:n]})
		p, off = p[n:], off+int64(n)
	}
	return pieces, nil
}

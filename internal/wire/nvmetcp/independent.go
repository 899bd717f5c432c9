package nvmetcp

// IndependentNamespace is what Identify tells of a namespace independently of its command set (CNSIndependent).
type IndependentNamespace struct {
	NMIC     uint8
	RESCAP   uint8
	ANAGRPID uint32
	NSATTR   uint8
	Ready    bool // NSTAT.NRDY
}

// Append encodes the structure.
func (p *IndependentNamespace) Append(b []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, IdentifySize)...)
	d := b[at:]
	d[1] = p.NMIC
	d[2] = p.RESCAP
	le.PutUint32(d[4:], p.ANAGRPID)
	d[8] = p.NSATTR
	d[14] = byte(bit(p.Ready, 0))
	return b
}

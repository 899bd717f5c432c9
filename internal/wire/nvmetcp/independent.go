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

// Decode takes the structure.
func (p *IndependentNamespace) Decode(b []byte) error {
	if err := short("Identify Namespace, independent of its command set", b, IdentifySize); err != nil {
		return err
	}
	*p = IndependentNamespace{NMIC: b[1], RESCAP: b[2], ANAGRPID: le.Uint32(b[4:]), NSATTR: b[8], Ready: b[14]&1 != 0}
	return nil
}

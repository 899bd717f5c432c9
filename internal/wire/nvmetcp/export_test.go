package nvmetcp

// Append encodes the structure.
func (p *NVMController) Append(b []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, IdentifySize)...)
	d := b[at:]
	d[0], d[1], d[2], d[3] = p.VSL, p.WZSL, p.WUSL, p.DMRL
	le.PutUint32(d[4:], p.DMRSL)
	le.PutUint64(d[8:], p.DMSL)
	return b
}

// Package nvmeauthtest makes secrets for tests.
package nvmeauthtest

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/weftfs/weft/internal/nvmeauth"
)

// NewSecret draws a secret to be transformed by h. It is as long as h's digest, or 32 bytes long for NoHash.
func NewSecret(h nvmeauth.Hash) nvmeauth.Secret {
	key := make([]byte, [...]int{32, 32, 48, 64}[h])
	rand.Read(key)
	key = binary.LittleEndian.AppendUint32(key, crc32.ChecksumIEEE(key))
	s, err := nvmeauth.ParseSecret(fmt.Sprintf("DHHC-1:%02d:%s:", uint8(h), base64.StdEncoding.EncodeToString(key)))
	if err != nil {
		panic(err)
	}
	return s
}

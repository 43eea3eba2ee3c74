package securelink

import (
	"bytes"
	"encoding/binary"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Sizes on the wire, in bytes.
const (
	prefixSize  = 8 // magic and version: the same in every version of the protocol
	helloSize   = 240
	proofSize   = 32
	verdictSize = 288
	verdictBody = verdictSize - proofSize // what the verdict's proof covers
)

const magic = "mlxcel"

// The sender of a hello, so that one sent back is not taken for an answer.
const (
	fromClient = 1
	fromServer = 2
)

// hello is the first message of both ends.
type hello struct {
	sender   byte
	identity Identity
	nonce    [32]byte
	share    [32]byte // X25519 public key
}

// encode lays out a valid hello.
func (h *hello) encode() (out [helloSize]byte) {
	copy(out[:], magic)
	binary.LittleEndian.PutUint16(out[6:], ProtocolVersion)
	out[8] = h.sender
	out[9] = byte(h.identity.Role)
	out[10] = byte(len(h.identity.NodeID))
	out[11] = byte(len(h.identity.Cluster))
	out[12] = byte(len(h.identity.Version))
	copy(out[16:48], h.nonce[:])
	copy(out[48:80], h.share[:])
	copy(out[80:144], h.identity.NodeID)
	copy(out[144:208], h.identity.Cluster)
	copy(out[208:240], h.identity.Version)
	return out
}

// decodePrefix returns the version, or false where the magic is not there.
func decodePrefix(prefix []byte) (version uint16, ok bool) {
	return binary.LittleEndian.Uint16(prefix[6:]), string(prefix[:6]) == magic
}

// decodeHello takes exactly what encode makes, whose prefix has been checked.
func decodeHello(in *[helloSize]byte, sender byte) (*hello, error) {
	h := &hello{sender: in[8]}
	h.identity.Role = Role(in[9])
	var ok [3]bool
	h.identity.NodeID, ok[0] = text(in[80:144], in[10])
	h.identity.Cluster, ok[1] = text(in[144:208], in[11])
	h.identity.Version, ok[2] = text(in[208:240], in[12])
	if h.sender != sender || !allZero(in[13:16]) || ok != [3]bool{true, true, true} || h.identity.validate() != nil {
		return nil, ErrMalformed
	}
	copy(h.nonce[:], in[16:48])
	copy(h.share[:], in[48:80])
	return h, nil
}

// text reads a field of fixed size whose unused end is zero.
func text(field []byte, n byte) (string, bool) {
	if int(n) > len(field) || !allZero(field[n:]) {
		return "", false
	}
	return string(field[:n]), true
}

func allZero(b []byte) bool { return len(bytes.TrimLeft(b, "\x00")) == 0 }

// The verdicts.
const (
	verdictAccept   = 1
	verdictCapacity = 2
	verdictRefused  = 3
)

// encodeVerdict lays out what the server decided; nil accepts.
func encodeVerdict(r *Refusal) (out [verdictBody]byte) {
	if r == nil {
		out[0] = verdictAccept
		return out
	}
	out[0] = verdictRefused
	if r.Code == RefusedBusy {
		out[0] = verdictCapacity
	}
	said := wireText(r.Text)
	out[1] = byte(r.Code)
	out[2] = byte(len(said))
	copy(out[4:], said)
	return out
}

// wireText makes any text one that a verdict can carry.
func wireText(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) <= MaxRefusalText {
		return s
	}
	end := MaxRefusalText
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}

// decodeVerdict takes exactly what encodeVerdict makes.
func decodeVerdict(in *[verdictBody]byte) (*Refusal, error) {
	said, ok := text(in[4:], in[2])
	if !ok || in[3] != 0 || !printable(said) {
		return nil, ErrMalformed
	}
	code := RefusalCode(in[1])
	switch {
	case in[0] == verdictAccept && code == 0 && said == "":
		return nil, nil
	case in[0] == verdictCapacity && code == RefusedBusy:
	case in[0] == verdictRefused && code != RefusedBusy && code != 0:
	default:
		return nil, ErrMalformed
	}
	return &Refusal{Code: code, Text: said}, nil
}

package securelink

import (
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"
	"io"
)

// MinSecret is the shortest secret that is taken, in bytes.
const MinSecret = 16

// Secret is what all nodes of a cluster share. Every way to print it prints "[secret]". The bytes are known to a
// function only: fmt shows what unexported fields hold or point to without asking for String, and so does hclog with
// slices, but neither looks into a function.
type Secret struct{ bytes func() []byte }

// NewSecret takes a copy of raw, which needs at least MinSecret bytes.
func NewSecret(raw []byte) (Secret, error) {
	if len(raw) < MinSecret {
		return Secret{}, &ShortSecretError{Got: len(raw)}
	}
	own := append([]byte(nil), raw...)
	return Secret{func() []byte { return own }}, nil
}

// IsZero tells whether there is no secret.
func (s Secret) IsZero() bool { return s.bytes == nil }

// Key derives 32 bytes for one purpose (HKDF-SHA256, no salt, info "mlxcel/6 " and the purpose), so that what is
// computed for one purpose says nothing about another. The secret itself is never used as a key.
func (s Secret) Key(purpose string) []byte {
	if s.IsZero() {
		panic("securelink: no secret to derive a key from") // every entry into this package has checked
	}
	return deriveKey(s.bytes(), nil, purpose)
}

func deriveKey(material, salt []byte, purpose string) []byte {
	key, err := hkdf.Key(sha256.New, material, salt, "mlxcel/6 "+purpose, 32)
	if err != nil {
		panic(err) // only a length beyond HKDF's is an error
	}
	return key
}

const redacted = "[secret]"

func (Secret) String() string   { return redacted }
func (Secret) GoString() string { return redacted }

// Format serves every verb, so that %x and %d print no bytes either.
func (Secret) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) }

// MarshalText serves encoders: JSON, TOML, slog.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

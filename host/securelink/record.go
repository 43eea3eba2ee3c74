package securelink

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
)

// Sizes of a record, in bytes. A record is its text's length (4 bytes, little-endian), the sealed text, and the tag.
// The length is authenticated with the text. A record without text closes the direction.
const (
	recordHeader   = 4
	recordTag      = 16
	recordOverhead = recordHeader + recordTag
	maxRecordText  = 64 << 10
)

// rekeyEvery is the number of records under one key. A record is at most 2^12 blocks of AES, so that a key covers at
// most 2^32: GCM's distinguishing advantage stays below 2^-63.
const rekeyEvery = 1 << 20

// keyedStream is one direction's key and the number of its next record.
type keyedStream struct {
	aead       cipher.AEAD
	key        []byte
	seq        uint64
	rekeyEvery uint64
	nonce      [12]byte
}

func newKeyedStream(key []byte, rekeyEvery uint64) (*keyedStream, error) {
	s := &keyedStream{rekeyEvery: rekeyEvery}
	return s, s.use(key)
}

func (s *keyedStream) use(key []byte) error {
	block, err := aes.NewCipher(key)
	if err != nil {
		return err
	}
	s.aead, err = cipher.NewGCM(block)
	s.key = key
	return err
}

// advance prepares nonce and key of the next record. Numbers go on over a change of keys, so no nonce ever repeats.
func (s *keyedStream) advance() error {
	if s.seq > 0 && s.seq%s.rekeyEvery == 0 {
		if err := s.use(deriveKey(s.key, nil, "next key")); err != nil {
			return err
		}
	}
	binary.LittleEndian.PutUint64(s.nonce[4:], s.seq)
	s.seq++
	return nil
}

// seal makes a record of text in to, which needs room for it and may hold text at its place already.
func (s *keyedStream) seal(to, text []byte) ([]byte, error) {
	if err := s.advance(); err != nil {
		return nil, err
	}
	header := to[:recordHeader]
	binary.LittleEndian.PutUint32(header, uint32(len(text)))
	return s.aead.Seal(header, s.nonce[:], text, header), nil
}

// open puts the text of a whole record into to, which needs room for it; to may be where the sealed text is.
func (s *keyedStream) open(to, record []byte) ([]byte, error) {
	if err := s.advance(); err != nil {
		return nil, err
	}
	text, err := s.aead.Open(to[:0], s.nonce[:], record[recordHeader:], record[:recordHeader])
	if err != nil {
		return nil, ErrRecordForged
	}
	return text, nil
}

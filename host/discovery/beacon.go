// Package discovery owns how a coordinator finds the nodes that wait for it: signed beacons over UDP, and what is believed of them.
//
// A waiting node sends one beacon each second from every usable address of its own; the coordinator listens. Only the datagram's
// signature makes it count. The logic is in Tracker, which has no socket and no clock; Announce and Search are the sockets.
//
// A beacon is BeaconSize bytes, little-endian. Unused ends of texts and reserved bytes are zero.
//
//	offset  size
//	     0     6  "mlxbcn"
//	     6     2  BeaconVersion
//	     8     1  length of the node id, from 1
//	     9     1  length of the cluster's name
//	    10     1  length of the program's version
//	    11     1  reserved
//	    12     2  TCP port that the node listens on
//	    14     2  reserved
//	    16     8  time of sending, milliseconds since 1970 UTC
//	    24     8  counter, larger in each datagram of one run of the sender
//	    32    16  boot id, random, of one run of the sender
//	    48    16  address that it is sent from, IPv6 or IPv4-mapped
//	    64    64  node id
//	   128    64  cluster's name
//	   192    32  program's version
//	   224    32  HMAC-SHA256 of what precedes, with the key that HKDF-SHA256 derives from the secret for "beacon"
package discovery

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Of beacons.
const (
	DefaultPort   = 49555 // UDP
	BeaconVersion = 1
	BeaconSize    = 256 // bytes

	signedSize = BeaconSize - sha256.Size
	magic      = "mlxbcn"
	keyPurpose = "beacon"

	// Longest texts, in bytes: those of the handshake.
	maxNodeID, maxCluster, maxVersion = 64, 64, 32
)

// BootID names one run of a node.
type BootID [16]byte

// Beacon is what a waiting node says of itself.
type Beacon struct {
	NodeID  string         // unique in the cluster and the same after a restart, 1 to 64 bytes
	Cluster string         // name, at most 64 bytes
	Version string         // of the program, at most 32 bytes
	Address netip.AddrPort // the address it is sent from, and the TCP port that the node listens on
	Boot    BootID
	Counter uint64
	Time    int64 // milliseconds since 1970 UTC
}

// What Decode refuses a datagram for.
var (
	ErrNotBeacon = errors.New("no beacon")
	ErrForged    = errors.New("not signed with the cluster's secret")
	ErrMalformed = errors.New("signed, but malformed")
)

// VersionError is a beacon of another version of the format.
type VersionError struct{ Got uint16 }

func (e *VersionError) Error() string {
	return fmt.Sprintf("beacon version %d, want %d: install the same version of mlxcel on every host", e.Got, BeaconVersion)
}

// Encode returns the signed datagram. key is securelink.Secret.Key("beacon").
func (b *Beacon) Encode(key []byte) ([]byte, error) {
	if err := b.validate(); err != nil {
		return nil, err
	}
	out := make([]byte, signedSize, BeaconSize)
	copy(out, magic)
	binary.LittleEndian.PutUint16(out[6:], BeaconVersion)
	out[8], out[9], out[10] = byte(len(b.NodeID)), byte(len(b.Cluster)), byte(len(b.Version))
	binary.LittleEndian.PutUint16(out[12:], b.Address.Port())
	binary.LittleEndian.PutUint64(out[16:], uint64(b.Time))
	binary.LittleEndian.PutUint64(out[24:], b.Counter)
	copy(out[32:], b.Boot[:])
	address := b.Address.Addr().As16()
	copy(out[48:], address[:])
	copy(out[64:], b.NodeID)
	copy(out[128:], b.Cluster)
	copy(out[192:], b.Version)
	return append(out, sign(key, out)...), nil
}

func sign(key, signed []byte) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write(signed)
	return mac.Sum(nil)
}

// Decode reads a datagram and checks its signature before anything else but magic and version. Beside ErrForged it returns the
// beacon's claims as far as they can be read, for a message; they are worth nothing else.
func Decode(datagram, key []byte) (*Beacon, error) {
	if len(datagram) < 8 || string(datagram[:6]) != magic {
		return nil, ErrNotBeacon
	}
	if v := binary.LittleEndian.Uint16(datagram[6:]); v != BeaconVersion {
		return nil, &VersionError{v}
	}
	if len(datagram) != BeaconSize {
		return nil, ErrNotBeacon
	}
	b, ok := parse(datagram)
	if !hmac.Equal(sign(key, datagram[:signedSize]), datagram[signedSize:]) {
		return b, ErrForged
	}
	if !ok {
		return nil, ErrMalformed
	}
	return b, nil
}

// parse reads the fields, nil and false where they are not what Encode makes.
func parse(in []byte) (*Beacon, bool) {
	var address [16]byte
	copy(address[:], in[48:])
	b := &Beacon{
		Address: netip.AddrPortFrom(netip.AddrFrom16(address).Unmap(), binary.LittleEndian.Uint16(in[12:])),
		Counter: binary.LittleEndian.Uint64(in[24:]),
		Time:    int64(binary.LittleEndian.Uint64(in[16:])),
	}
	copy(b.Boot[:], in[32:])
	var ok [3]bool
	b.NodeID, ok[0] = text(in[64:128], in[8])
	b.Cluster, ok[1] = text(in[128:192], in[9])
	b.Version, ok[2] = text(in[192:224], in[10])
	reserved := in[11] == 0 && in[14] == 0 && in[15] == 0
	if ok != [3]bool{true, true, true} || !reserved || b.validate() != nil {
		return nil, false
	}
	return b, true
}

func text(field []byte, n byte) (string, bool) {
	if int(n) > len(field) || strings.Trim(string(field[n:]), "\x00") != "" {
		return "", false
	}
	return string(field[:n]), true
}

func (b *Beacon) validate() error {
	if b.NodeID == "" {
		return errors.New("beacon: the node id is empty")
	}
	for _, f := range []struct {
		name, text string
		max        int
	}{{"node id", b.NodeID, maxNodeID}, {"cluster name", b.Cluster, maxCluster}, {"program version", b.Version, maxVersion}} {
		if len(f.text) > f.max {
			return fmt.Errorf("beacon: the %s has %d bytes, at most %d fit", f.name, len(f.text), f.max)
		}
		if !utf8.ValidString(f.text) || strings.ContainsFunc(f.text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return fmt.Errorf("beacon: the %s %q is not printable UTF-8", f.name, f.text)
		}
	}
	if ip := b.Address.Addr(); !ip.IsValid() || ip.IsUnspecified() || ip.IsMulticast() || b.Address.Port() == 0 {
		return fmt.Errorf("beacon: nobody can reach a node at %s", b.Address)
	}
	return nil
}

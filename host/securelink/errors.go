package securelink

import (
	"errors"
	"fmt"
)

// The causes that errors of this package wrap.
var (
	// ErrSecret is what every SecretError is.
	ErrSecret = errors.New("cluster secret differs")
	// ErrNoSecret is a Config without one.
	ErrNoSecret = errors.New("no cluster secret: " + secretWays)
	// ErrNotPeer means that the other end speaks something else.
	ErrNotPeer = errors.New("the other end does not speak the mlxcel cluster protocol")
	// ErrMalformed is a message that no node of this version sends.
	ErrMalformed = errors.New("malformed handshake message")
	// ErrReflected is this node's own hello, sent back to it.
	ErrReflected = errors.New("the other end sent our own hello back")
	// ErrCrowdedOut is a handshake given up for a newer one, because too many were unfinished.
	ErrCrowdedOut = errors.New("given up for newer connections: too many unfinished handshakes")
	// ErrRecordForged is a record that is not the next one of the peer: changed, replayed, reordered, or one before it is missing.
	ErrRecordForged = errors.New("record does not authenticate: changed, injected, replayed, out of order, or one before it is missing")
	// ErrRecordTooLong is a record's length that no node of this version sends.
	ErrRecordTooLong = errors.New("record is too long")
)

const secretWays = "give every node the same one with --cluster-secret-file, MLXCEL_CLUSTER_SECRET_FILE, " +
	"MLXCEL_CLUSTER_SECRET, or secret_file under [cluster] in the cluster TOML"

// ShortSecretError refuses a secret that could be guessed.
type ShortSecretError struct{ Got int } // bytes

func (e *ShortSecretError) Error() string {
	return fmt.Sprintf("cluster secret has %d bytes, at least %d are needed: make one with mlxcel cluster secret new FILE", e.Got, MinSecret)
}

// SecretError means that the other end could not prove that it holds our secret. It Is ErrSecret.
type SecretError struct {
	Peer   string // its address
	Reason string // how it showed
}

func (e *SecretError) Error() string {
	return fmt.Sprintf("peer %s: %s; %s", e.Peer, e.Reason, secretWays)
}

func (e *SecretError) Is(target error) bool { return target == ErrSecret }

// ProtocolError means that the other end speaks another version of the protocol.
type ProtocolError struct {
	Peer string // its address
	Got  uint16 // the peer's version
	Want uint16 // ours
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("peer %s speaks cluster protocol version %d, this node %d: install the same mlxcel on every node", e.Peer, e.Got, e.Want)
}

// RefusedError is an authentic verdict other than "accept". Both ends get one.
type RefusedError struct {
	Addr    string   // of the other end
	Peer    Identity // of the other end, authenticated
	Refusal Refusal
	ByUs    bool // this node refused the peer, not the other way round
}

func (e *RefusedError) Error() string {
	if e.ByUs {
		return fmt.Sprintf("refused %s %q at %s: %s", e.Peer.Role, e.Peer.NodeID, e.Addr, e.Refusal)
	}
	return fmt.Sprintf("%s %q at %s refused this node: %s", e.Peer.Role, e.Peer.NodeID, e.Addr, e.Refusal)
}

// HandshakeError is a handshake that ended before its verdict, for what is no other type's.
type HandshakeError struct {
	Peer string // its address
	Step string // what this end was doing
	Err  error
}

func (e *HandshakeError) Error() string {
	return fmt.Sprintf("handshake with %s, %s: %v", e.Peer, e.Step, e.Err)
}

func (e *HandshakeError) Unwrap() error { return e.Err }

// RecordError means that what arrived on an established connection is not what the peer sent. The connection is closed.
type RecordError struct {
	Addr string   // of the other end
	Peer Identity // that was authenticated
	Seq  uint64   // the record's number, from 0
	Err  error    // ErrRecordForged or ErrRecordTooLong
}

func (e *RecordError) Error() string {
	return fmt.Sprintf("record %d from %s %q at %s: %v", e.Seq, e.Peer.Role, e.Peer.NodeID, e.Addr, e.Err)
}

func (e *RecordError) Unwrap() error { return e.Err }

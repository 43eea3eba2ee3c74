// Package transport owns the connections between nodes: one listening port for all kinds of them, dialling by candidate
// addresses, and the heartbeats that tell a silent node from a slow one.
package transport

import (
	"encoding/binary"
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// Kind says what a connection is for. It is the first byte sealed on it.
type Kind byte

const (
	KindControl   Kind = 'C' // gRPC, coordinator to peer
	KindData      Kind = 'D' // orders to a stage, results back
	KindLink      Kind = 'L' // activations, a stage to the next
	KindHeartbeat Kind = 'H' // beats, both ways
	KindStatus    Kind = 'S' // gRPC, a tool to a coordinator or a peer
)

func (k Kind) String() string {
	switch k {
	case KindControl:
		return "control"
	case KindData:
		return "data"
	case KindLink:
		return "link"
	case KindHeartbeat:
		return "heartbeat"
	case KindStatus:
		return "status"
	}
	return fmt.Sprintf("kind %#x", byte(k))
}

func (k Kind) known() bool {
	switch k {
	case KindControl, KindData, KindLink, KindHeartbeat, KindStatus:
		return true
	}
	return false
}

// Session names one run of a coordinator. It is random, so that a connection of an earlier run is never taken for one
// of this.
type Session [16]byte

func (s Session) String() string { return fmt.Sprintf("%x", s[:4]) }

// Opening is what the dialling side says first, once the handshake is done: what the connection is for.
type Opening struct {
	Kind    Kind
	Session Session   // of the coordinator's run; zero on a status connection
	Place   sdk.Place // of the dialling stage, on a link and on a heartbeat between stages
}

// openingSize is the length of an Opening on the wire: kind, session, stage and rank (little-endian).
const openingSize = 1 + 16 + 2 + 2

// append writes o at the end of b.
func (o Opening) append(b []byte) []byte {
	b = append(b, byte(o.Kind))
	b = append(b, o.Session[:]...)
	b = binary.LittleEndian.AppendUint16(b, uint16(o.Place.Stage))
	return binary.LittleEndian.AppendUint16(b, uint16(o.Place.Rank))
}

// UnknownKindError is a connection that opens with a byte that names no kind.
type UnknownKindError struct {
	Got Kind
}

func (e *UnknownKindError) Error() string {
	return fmt.Sprintf("connection opens with %v: want one of C, D, H, L, S: both nodes must run the same version of mlxcel", e.Got)
}

// parseOpening reads what append wrote.
func parseOpening(b *[openingSize]byte) (Opening, error) {
	number := func(at int) int { return int(binary.LittleEndian.Uint16(b[at:])) }
	o := Opening{Kind: Kind(b[0]), Session: Session(b[1:17]), Place: sdk.Place{Stage: number(17), Rank: number(19)}}
	if !o.Kind.known() {
		return Opening{}, &UnknownKindError{Got: o.Kind}
	}
	return o, nil
}

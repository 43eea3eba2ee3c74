// Package securelink owns the authenticated, encrypted connection between two nodes of a cluster.
//
// Both ends prove that they hold the cluster's secret, agree on keys that no other connection shares, and then
// exchange sealed records. Conn is a net.Conn, so anything runs on it. docs/protocol.md is the specification.
package securelink

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode"
	"unicode/utf8"
)

// ProtocolVersion is what this package speaks. Two nodes must agree on it exactly.
const ProtocolVersion = 6

// DefaultHandshakeTimeout bounds a handshake from its first byte to its verdict.
const DefaultHandshakeTimeout = 5 * time.Second

// Role is what a node is in its cluster.
type Role uint8

// The roles; their numbers are on the wire.
const (
	RoleCoordinator Role = 1 // plans, gives orders, runs no stage
	RoleStage       Role = 2 // runs a stage, or waits for one
	RoleTool        Role = 3 // looks only: status, doctor
)

func (r Role) String() string {
	switch r {
	case RoleCoordinator:
		return "coordinator"
	case RoleStage:
		return "stage"
	case RoleTool:
		return "tool"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// The longest names in a hello, in bytes.
const (
	MaxNodeID  = 64
	MaxCluster = 64
	MaxVersion = 32
)

// Identity is what a node says of itself, and what the handshake authenticates. Texts are printable UTF-8.
type Identity struct {
	Role    Role
	NodeID  string // 1 to MaxNodeID bytes
	Cluster string // the cluster's name, at most MaxCluster bytes; may be empty
	Version string // the program's, at most MaxVersion bytes; may be empty
}

func (id Identity) validate() error {
	if id.Role < RoleCoordinator || id.Role > RoleTool {
		return fmt.Errorf("unknown role %d", uint8(id.Role))
	}
	if id.NodeID == "" {
		return errors.New("the node id is empty")
	}
	for _, field := range []struct {
		name, text string
		max        int
	}{{"node id", id.NodeID, MaxNodeID}, {"cluster name", id.Cluster, MaxCluster}, {"program version", id.Version, MaxVersion}} {
		if len(field.text) > field.max {
			return fmt.Errorf("the %s has %d bytes, at most %d fit", field.name, len(field.text), field.max)
		}
		if !printable(field.text) {
			return fmt.Errorf("the %s %q is not printable UTF-8", field.name, field.text)
		}
	}
	return nil
}

// printable keeps what a peer says of itself from drawing on the terminal of whoever reads the log.
func printable(s string) bool {
	if !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return false
		}
	}
	return true
}

// Config is one node's side of a handshake.
type Config struct {
	Secret           Secret        // the cluster's; required
	Self             Identity      // of this node; required
	HandshakeTimeout time.Duration // of the whole handshake; default DefaultHandshakeTimeout
	Rand             io.Reader     // of nonces and key shares; default crypto/rand

	rekeyEvery uint64 // records per key; default rekeyEvery, and both ends must agree
}

func (c Config) withDefaults() (Config, error) {
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = DefaultHandshakeTimeout
	}
	if c.Rand == nil {
		c.Rand = rand.Reader
	}
	if c.rekeyEvery == 0 {
		c.rekeyEvery = rekeyEvery
	}
	if c.Secret.IsZero() {
		return c, ErrNoSecret
	}
	if err := c.Self.validate(); err != nil {
		return c, fmt.Errorf("own identity: %w", err)
	}
	return c, nil
}

package stagelink

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/mlxcel/mlxcel/host/wire"
)

// A self-test goes over a link before anything else: a few empty rounds, of which the fastest is the round trip, then
// one block of random bytes, whose checksum both sides must agree on.
const (
	selfTestRounds = 8
	selfTestBytes  = 4 << 20
	// flagLast marks the last round, the one with the block.
	flagLast uint16 = 1
)

// Probe is what a self-test has measured.
type Probe struct {
	RoundTrip      time.Duration // of an empty frame
	BytesPerSecond float64       // of the block, its checksums included
}

// ChecksumError is a link that delivers other bytes than were sent.
type ChecksumError struct {
	Sent, Got [sha256.Size]byte
}

func (e *ChecksumError) Error() string {
	return fmt.Sprintf("the link delivers other bytes than were sent: sha256 %x of %d bytes, sent %x: check the network path, or pick another with other addresses", e.Got[:8], selfTestBytes, e.Sent[:8])
}

// SelfTest tests a link from the side that dialled it; random is where the block comes from. The other side runs
// AnswerSelfTest. The connection is ready for activations afterwards. The end of ctx ends the test and the connection.
func SelfTest(ctx context.Context, conn net.Conn, random io.Reader) (Probe, error) {
	block := make([]byte, selfTestBytes)
	if _, err := io.ReadFull(random, block); err != nil {
		return Probe{}, fmt.Errorf("random block of the link's self-test: %w", err)
	}
	var p Probe
	err := during(ctx, conn, func() (err error) {
		p, err = selfTest(conn, block)
		return err
	})
	return p, err
}

func selfTest(conn net.Conn, block []byte) (p Probe, err error) {
	w := wire.NewWriter(conn, wire.Limits{Data: selfTestBytes, Meta: sha256.Size})
	r := wire.NewReader(conn, wire.Limits{Meta: sha256.Size})
	round := func(flags uint16, data []byte) (sum [sha256.Size]byte, took time.Duration, err error) {
		begin := time.Now()
		h := wire.Header{Kind: kindSelfTest, Flags: flags, Dtype: wire.Uint8, Rank: 1, Dims: [wire.MaxRank]uint32{uint32(len(data))}}
		if err := w.Write(h, nil, data); err != nil {
			return sum, 0, err
		}
		h, meta, err := r.Next()
		if err == nil && (h.Kind != kindSelfTestReply || len(meta) != len(sum)) {
			err = &DecodeError{Kind: h.Kind, Fault: "no answer to a self-test"}
		}
		copy(sum[:], meta)
		return sum, time.Since(begin), err
	}
	for i := range selfTestRounds {
		_, took, err := round(0, nil)
		if err != nil {
			return p, err
		}
		if i == 0 || took < p.RoundTrip {
			p.RoundTrip = took
		}
	}
	got, took, err := round(flagLast, block)
	if err != nil {
		return p, err
	}
	if sent := sha256.Sum256(block); got != sent {
		return p, &ChecksumError{Sent: sent, Got: got}
	}
	p.BytesPerSecond = float64(len(block)) / took.Seconds()
	return p, nil
}

// AnswerSelfTest is the other side of SelfTest.
func AnswerSelfTest(ctx context.Context, conn net.Conn) error {
	return during(ctx, conn, func() error { return answerSelfTest(conn) })
}

func answerSelfTest(conn net.Conn) error {
	r := wire.NewReader(conn, wire.Limits{Data: selfTestBytes})
	w := wire.NewWriter(conn, wire.Limits{Meta: sha256.Size})
	for range selfTestRounds + 1 {
		h, _, err := r.Next()
		if err != nil {
			return err
		}
		if h.Kind != kindSelfTest {
			return &DecodeError{Kind: h.Kind, Fault: "a self-test should come first"}
		}
		data := make([]byte, h.Data)
		if err := r.ReadData(data); err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		if err := w.Write(wire.Header{Kind: kindSelfTestReply}, sum[:], nil); err != nil {
			return err
		}
		if h.Flags == flagLast {
			return nil
		}
	}
	return errors.New("the link's self-test does not end")
}

// during runs f, which uses conn; the end of ctx closes conn and is then the error.
func during(ctx context.Context, conn net.Conn, f func() error) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	err := f()
	if !stop() {
		return fmt.Errorf("self-test of the link: %w", context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("self-test of the link: %w", err)
	}
	return nil
}

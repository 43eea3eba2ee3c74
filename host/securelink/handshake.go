package securelink

import (
	"context"
	"crypto/ecdh"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// Client proves itself to the server at the other end of c and returns the secured connection. It closes c when it
// fails. Errors: *ProtocolError, *SecretError, *RefusedError, *HandshakeError; all else is a fault of cfg.
func Client(ctx context.Context, c net.Conn, cfg Config) (*Conn, error) {
	return shake(ctx, c, cfg, func(h *handshake) (*Conn, error) { return h.client() })
}

// Server lets the client at the other end of c prove itself, asks decide, and returns the secured connection. It
// closes c when it fails or refuses. decide sees only identities that are proven; nil accepts, and so does a nil
// decide. Errors are those of Client.
func Server(ctx context.Context, c net.Conn, cfg Config, decide func(Identity) *Refusal) (*Conn, error) {
	return serve(ctx, c, cfg, decide, func() {})
}

// serve is Server; greeted is called once a whole hello has come.
func serve(ctx context.Context, c net.Conn, cfg Config, decide func(Identity) *Refusal, greeted func()) (*Conn, error) {
	return shake(ctx, c, cfg, func(h *handshake) (*Conn, error) { return h.server(decide, greeted) })
}

// handshake is one end's state of one handshake.
type handshake struct {
	cfg        Config
	conn       net.Conn
	private    *ecdh.PrivateKey
	transcript []byte // every message so far, in order
}

// shake runs one end within the time limit and ctx.
func shake(ctx context.Context, c net.Conn, cfg Config, run func(*handshake) (*Conn, error)) (_ *Conn, err error) {
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if cfg, err = cfg.withDefaults(); err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Now().Add(cfg.HandshakeTimeout)); err != nil {
		return nil, &HandshakeError{Peer: addr(c), Step: "setting the time limit", Err: err}
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		c.SetDeadline(time.Unix(1, 0))
	})
	conn, err := run(&handshake{cfg: cfg, conn: c, transcript: make([]byte, 0, 2*helloSize+proofSize+verdictBody)})
	if !stop() {
		<-interrupted
		if _, refused := errors.AsType[*RefusedError](err); !refused {
			return nil, &HandshakeError{Peer: addr(c), Step: "interrupted", Err: context.Cause(ctx)}
		}
	}
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, &HandshakeError{Peer: addr(c), Step: "lifting the time limit", Err: err}
	}
	return conn, nil
}

func (h *handshake) client() (*Conn, error) {
	mine, err := h.newHello(fromClient)
	if err != nil {
		return nil, err
	}
	if err := h.send("sending our hello", mine[:]); err != nil {
		return nil, err
	}
	peer, err := h.receiveHello(fromServer)
	if err != nil {
		return nil, err
	}
	if string(peer.share[:]) == string(h.private.PublicKey().Bytes()) {
		return nil, h.fail("reading the server's hello", ErrReflected)
	}
	proof := h.sign("client proof")
	if err := h.send("sending our proof", proof); err != nil {
		return nil, err
	}
	if err := h.receiveVerdict(peer.identity); err != nil {
		return nil, err
	}
	return h.secured(peer, "client to server", "server to client")
}

func (h *handshake) server(decide func(Identity) *Refusal, greeted func()) (*Conn, error) {
	peer, err := h.receiveHello(fromClient)
	if err != nil {
		return nil, err
	}
	greeted()
	mine, err := h.newHello(fromServer)
	if err != nil {
		return nil, err
	}
	if err := h.send("sending our hello", mine[:]); err != nil {
		return nil, err
	}
	want := h.sign("client proof")
	proof, err := h.receive("waiting for the client's proof", proofSize)
	if err != nil {
		return nil, err
	}
	if !hmac.Equal(proof, want) {
		return nil, &SecretError{Peer: addr(h.conn), Reason: "the client's proof does not verify: its cluster secret differs"}
	}
	var refusal *Refusal
	if decide != nil {
		refusal = decide(peer.identity)
	}
	if err := h.sendVerdict(refusal); err != nil {
		return nil, err
	}
	if refusal != nil {
		return nil, &RefusedError{Addr: addr(h.conn), Peer: peer.identity, Refusal: *refusal, ByUs: true}
	}
	return h.secured(peer, "server to client", "client to server")
}

// newHello draws the nonce and the key share. The private key is made from the drawn bytes because GenerateKey does not ask Rand.
func (h *handshake) newHello(sender byte) (out [helloSize]byte, err error) {
	own := hello{sender: sender, identity: h.cfg.Self}
	var seed [32]byte
	if _, err = io.ReadFull(h.cfg.Rand, own.nonce[:]); err == nil {
		_, err = io.ReadFull(h.cfg.Rand, seed[:])
	}
	if err == nil {
		h.private, err = ecdh.X25519().NewPrivateKey(seed[:])
	}
	if err != nil {
		return out, h.fail("drawing random bytes", err)
	}
	copy(own.share[:], h.private.PublicKey().Bytes())
	return own.encode(), nil
}

// receiveHello reads no further than the prefix where the version differs: the rest may look like anything.
func (h *handshake) receiveHello(sender byte) (*hello, error) {
	const step = "waiting for the other end's hello"
	prefix, err := h.receive(step, prefixSize)
	if err != nil {
		return nil, err
	}
	version, ok := decodePrefix(prefix)
	if !ok {
		return nil, h.fail(step, ErrNotPeer)
	}
	if version != ProtocolVersion {
		if sender == fromClient {
			h.tellVersion()
		}
		return nil, &ProtocolError{Peer: addr(h.conn), Got: version, Want: ProtocolVersion}
	}
	if _, err := h.receive(step, helloSize-prefixSize); err != nil {
		return nil, err
	}
	peer, err := decodeHello((*[helloSize]byte)(h.transcript[len(h.transcript)-helloSize:]), sender)
	if err != nil {
		return nil, h.fail(step, err)
	}
	return peer, nil
}

// tellVersion lets a client of another version learn ours. What it has sent is read away first, at most farewell
// bytes, because closing a socket with unread bytes may destroy the answer.
func (h *handshake) tellVersion() {
	const farewell = 4096
	ours := (&hello{}).encode()
	if _, err := h.conn.Write(ours[:prefixSize]); err != nil {
		return
	}
	if half, ok := h.conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		io.CopyN(io.Discard, h.conn, farewell)
	}
}

func (h *handshake) sendVerdict(refusal *Refusal) error {
	body := encodeVerdict(refusal)
	h.transcript = append(h.transcript, body[:]...)
	verdict := append(body[:], h.sign("server verdict")...)
	if _, err := h.conn.Write(verdict); err != nil {
		return h.fail("sending our verdict", err)
	}
	return nil
}

func (h *handshake) receiveVerdict(peer Identity) error {
	const step = "waiting for the server's verdict"
	body, err := h.receive(step, verdictBody)
	if errors.Is(err, io.EOF) {
		return &SecretError{Peer: addr(h.conn), Reason: "the peer closed on our proof: its cluster secret differs"}
	}
	if err != nil {
		return err
	}
	want := h.sign("server verdict")
	var proof [proofSize]byte
	if _, err := io.ReadFull(h.conn, proof[:]); err != nil {
		return h.fail(step, err)
	}
	if !hmac.Equal(proof[:], want) {
		return &SecretError{Peer: addr(h.conn),
			Reason: "its verdict does not verify: its cluster secret differs, or something on the way changed it"}
	}
	refusal, err := decodeVerdict((*[verdictBody]byte)(body))
	if err != nil {
		return h.fail(step, err)
	}
	if refusal != nil {
		return &RefusedError{Addr: addr(h.conn), Peer: peer, Refusal: *refusal}
	}
	return nil
}

// secured makes the keys from both ends' shares, the secret and the whole handshake.
func (h *handshake) secured(peer *hello, send, receive string) (*Conn, error) {
	const step = "agreeing on keys"
	theirs, err := ecdh.X25519().NewPublicKey(peer.share[:])
	if err != nil {
		return nil, h.fail(step, err)
	}
	shared, err := h.private.ECDH(theirs)
	if err != nil {
		return nil, h.fail(step, err)
	}
	salt := sha256.Sum256(h.transcript)
	material := append(h.cfg.Secret.Key("traffic"), shared...)
	out, err := newKeyedStream(deriveKey(material, salt[:], send), h.cfg.rekeyEvery)
	if err != nil {
		return nil, h.fail(step, err)
	}
	in, err := newKeyedStream(deriveKey(material, salt[:], receive), h.cfg.rekeyEvery)
	if err != nil {
		return nil, h.fail(step, err)
	}
	return newConn(h.conn, peer.identity, in, out), nil
}

// sign proves that this end holds the secret and saw the transcript so far.
func (h *handshake) sign(purpose string) []byte {
	mac := hmac.New(sha256.New, h.cfg.Secret.Key(purpose))
	mac.Write(h.transcript)
	return mac.Sum(nil)
}

// send writes a message and adds it to the transcript.
func (h *handshake) send(step string, message []byte) error {
	h.transcript = append(h.transcript, message...)
	if _, err := h.conn.Write(message); err != nil {
		return h.fail(step, err)
	}
	return nil
}

// receive reads n bytes and adds them to the transcript.
func (h *handshake) receive(step string, n int) ([]byte, error) {
	start := len(h.transcript)
	h.transcript = h.transcript[:start+n]
	message := h.transcript[start:]
	if _, err := io.ReadFull(h.conn, message); err != nil {
		return nil, h.fail(step, err)
	}
	return message, nil
}

func (h *handshake) fail(step string, err error) error {
	if isTimeout(err) {
		err = fmt.Errorf("nothing within %s: %w", h.cfg.HandshakeTimeout, err)
	}
	return &HandshakeError{Peer: addr(h.conn), Step: step, Err: err}
}

func addr(c net.Conn) string {
	if a := c.RemoteAddr(); a != nil {
		return a.String()
	}
	return "unknown address"
}

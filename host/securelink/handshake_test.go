package securelink

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/host/internal/tcptest"
)

func TestHandshake(t *testing.T) {
	client, server := tcptest.Pair(t)
	var asked Identity
	clientCfg, serverCfg := testConfig(t, RoleCoordinator, "c"), testConfig(t, RoleStage, "s")
	c, s, clientErr, serverErr := shakeHands(t, client, server, clientCfg, serverCfg, func(id Identity) *Refusal { asked = id; return nil })
	if clientErr != nil || serverErr != nil {
		t.Fatal(clientErr, serverErr)
	}
	if c.Peer() != serverCfg.Self || s.Peer() != clientCfg.Self || asked != clientCfg.Self {
		t.Errorf("client sees %+v, server %+v, asked about %+v", c.Peer(), s.Peer(), asked)
	}
}

func TestWrongSecret(t *testing.T) {
	client, server := tcptest.Pair(t)
	clientCfg, serverCfg := testConfig(t, RoleCoordinator, "c"), testConfig(t, RoleStage, "s")
	clientCfg.Secret = testSecret(t, "another secret than the server's")
	_, _, clientErr, serverErr := shakeHands(t, client, server, clientCfg, serverCfg, func(Identity) *Refusal {
		t.Error("asked about a client that has proven nothing")
		return nil
	})
	for name, c := range map[string]struct {
		err    error
		peer   net.Conn
		reason string
	}{
		"client": {clientErr, client, "the peer closed on our proof: its cluster secret differs"},
		"server": {serverErr, server, "the client's proof does not verify: its cluster secret differs"},
	} {
		secretErr, ok := errors.AsType[*SecretError](c.err)
		if !ok || !errors.Is(c.err, ErrSecret) || secretErr.Reason != c.reason || secretErr.Peer != c.peer.RemoteAddr().String() {
			t.Errorf("%s: got %v", name, c.err)
			continue
		}
		for _, way := range []string{"--cluster-secret-file", "MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_CLUSTER_SECRET,", "secret_file"} {
			if !strings.Contains(c.err.Error(), way) {
				t.Errorf("%s: %q does not name %s", name, c.err, way)
			}
		}
	}
}

func TestConfigFaults(t *testing.T) {
	good := testConfig(t, RoleStage, "s")
	for name, change := range map[string]func(*Config){
		"no secret":    func(c *Config) { c.Secret = Secret{} },
		"no role":      func(c *Config) { c.Self.Role = 0 },
		"no node":      func(c *Config) { c.Self.NodeID = "" },
		"long cluster": func(c *Config) { c.Self.Cluster = strings.Repeat("x", MaxCluster+1) },
		"control":      func(c *Config) { c.Self.Version = "v1\n" },
	} {
		cfg := good
		change(&cfg)
		for end, shake := range map[string]func(net.Conn) error{
			"client": func(c net.Conn) error { _, err := Client(t.Context(), c, cfg); return err },
			"server": func(c net.Conn) error { _, err := Server(t.Context(), c, cfg, nil); return err },
		} {
			conn := &wireConn{Reader: strings.NewReader("")}
			if err := shake(conn); err == nil || !conn.closed || conn.written.Len() > 0 {
				t.Errorf("%s, %s: %v, closed %v, sent %d bytes", name, end, err, conn.closed, conn.written.Len())
			}
		}
		if _, err := NewListener(nil, ListenerConfig{Config: cfg}); err == nil {
			t.Errorf("%s: the listener takes it", name)
		}
	}
}

func TestRefusal(t *testing.T) {
	for _, want := range []Refusal{
		{RefusedBusy, "two coordinators"},
		{RefusedVersion, "v0.8.0 here, v0.7.0 there"},
		{RefusedCluster, ""},
		{99, "of a later version"},
	} {
		client, server := tcptest.Pair(t)
		_, _, clientErr, serverErr := shakeHands(t, client, server, testConfig(t, RoleCoordinator, "c"), testConfig(t, RoleStage, "s"),
			func(Identity) *Refusal { return &want })
		c, ok1 := errors.AsType[*RefusedError](clientErr)
		s, ok2 := errors.AsType[*RefusedError](serverErr)
		if !ok1 || !ok2 {
			t.Errorf("%v: client got %v, server %v", want, clientErr, serverErr)
			continue
		}
		if c.Refusal != want || c.ByUs || c.Peer.NodeID != "s" || s.Refusal != want || !s.ByUs || s.Peer.NodeID != "c" {
			t.Errorf("%v: client got %+v, server %+v", want, c, s)
		}
	}
}

// A node of another version learns ours and we its, whoever dials and whatever its messages look like.
func TestVersionSkew(t *testing.T) {
	for name, rest := range map[string]int{"shorter hello": 10, "same": helloSize - prefixSize, "longer hello": 3000} {
		hello := make([]byte, prefixSize+rest)
		copy(hello, magic)
		binary.LittleEndian.PutUint16(hello[6:], ProtocolVersion+1)

		t.Run("client, "+name, func(t *testing.T) {
			client, server := tcptest.Pair(t)
			answer := make(chan []byte, 1)
			go func() {
				client.Write(hello)
				got, _ := io.ReadAll(client)
				client.Close()
				answer <- got
			}()
			_, err := Server(t.Context(), server, testConfig(t, RoleStage, "s"), nil)
			wantSkew(t, err, server)
			if got := <-answer; len(got) != prefixSize || string(got[:6]) != magic || binary.LittleEndian.Uint16(got[6:]) != ProtocolVersion {
				t.Errorf("the client learnt %q", got)
			}
		})
		t.Run("server, "+name, func(t *testing.T) {
			client, server := tcptest.Pair(t)
			go func() {
				io.CopyN(io.Discard, server, helloSize)
				server.Write(hello)
			}()
			_, err := Client(t.Context(), client, testConfig(t, RoleStage, "s"))
			wantSkew(t, err, client)
		})
	}
}

func wantSkew(t *testing.T, err error, c net.Conn) {
	t.Helper()
	if skew, ok := errors.AsType[*ProtocolError](err); !ok || *skew != (ProtocolError{Peer: c.RemoteAddr().String(), Got: ProtocolVersion + 1, Want: ProtocolVersion}) {
		t.Errorf("got %v", err)
	}
}

// Someone on the way changes one message.
func TestChangedMessages(t *testing.T) {
	type flight int
	const (
		clientHello flight = iota
		serverHello
		clientProof
		serverVerdict
	)
	refusal := encodeVerdict(&Refusal{Code: RefusedCluster})
	busy := encodeVerdict(&Refusal{Code: RefusedBusy})
	accept := encodeVerdict(nil)
	flip := func(at int) func([]byte) []byte {
		return func(b []byte) []byte { b[at] ^= 1; return b }
	}
	replace := func(head []byte) func([]byte) []byte {
		return func(b []byte) []byte { copy(b, head); return b }
	}
	var refuse = func(Identity) *Refusal { return &Refusal{Code: RefusedRole} }
	for name, c := range map[string]struct {
		which          flight
		change         func([]byte) []byte
		decide         func(Identity) *Refusal
		client, server error // that they must be; nil is any
	}{
		"client's role":          {clientHello, replace([]byte("mlxcel\x06\x00\x01\x03")), nil, ErrSecret, ErrSecret},
		"client's nonce":         {clientHello, flip(20), nil, ErrSecret, ErrSecret},
		"client's share":         {clientHello, flip(50), nil, ErrSecret, ErrSecret},
		"client's node":          {clientHello, flip(80), nil, ErrSecret, ErrSecret},
		"client's magic":         {clientHello, flip(0), nil, nil, ErrNotPeer},
		"client's reserved byte": {clientHello, flip(14), nil, nil, ErrMalformed},
		"server's nonce":         {serverHello, flip(20), nil, ErrSecret, ErrSecret},
		"server's share":         {serverHello, flip(50), nil, ErrSecret, ErrSecret},
		"server's node":          {serverHello, flip(80), nil, ErrSecret, ErrSecret},
		"server's magic":         {serverHello, flip(0), nil, ErrNotPeer, nil},
		"server's reserved byte": {serverHello, flip(14), nil, ErrMalformed, nil},
		"proof":                  {clientProof, flip(31), nil, ErrSecret, ErrSecret},
		"proof cut":              {clientProof, func(b []byte) []byte { return b[:31] }, nil, nil, io.ErrUnexpectedEOF},
		"verdict cut":            {serverVerdict, func(b []byte) []byte { return b[:200] }, nil, io.ErrUnexpectedEOF, nil},
		"verdict's proof cut":    {serverVerdict, func(b []byte) []byte { return b[:287] }, nil, io.ErrUnexpectedEOF, nil},
		"accept to refusal":      {serverVerdict, replace(refusal[:]), nil, ErrSecret, nil},
		"accept to busy":         {serverVerdict, replace(busy[:]), nil, ErrSecret, nil},
		"refusal to accept":      {serverVerdict, replace(accept[:]), refuse, ErrSecret, nil},
		"refusal to busy":        {serverVerdict, replace(busy[:]), refuse, ErrSecret, nil},
		"refusal's reason":       {serverVerdict, replace(refusal[:]), refuse, ErrSecret, nil},
		"verdict's proof":        {serverVerdict, flip(260), nil, ErrSecret, nil},
	} {
		t.Run(name, func(t *testing.T) {
			client, toClient := tcptest.Pair(t)
			toServer, server := tcptest.Pair(t)
			change := func(which flight, message []byte) []byte {
				if which != c.which {
					return message
				}
				return c.change(message)
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				relay(toServer, toClient, []int{helloSize, proofSize}, func(i int, b []byte) []byte { return change(flight(2*i), b) })
			})
			wg.Go(func() {
				relay(toClient, toServer, []int{helloSize, verdictSize}, func(i int, b []byte) []byte { return change(flight(2*i+1), b) })
			})
			conn, accepted, clientErr, serverErr := shakeHands(t, client, server, testConfig(t, RoleCoordinator, "c"), testConfig(t, RoleStage, "s"), c.decide)
			if accepted != nil {
				accepted.Close()
			}
			if conn != nil || clientErr == nil {
				t.Errorf("the client accepted: %v", clientErr)
			}
			if c.client != nil && !errors.Is(clientErr, c.client) {
				t.Errorf("client: got %v, want %v", clientErr, c.client)
			}
			if c.server != nil && !errors.Is(serverErr, c.server) {
				t.Errorf("server: got %v, want %v", serverErr, c.server)
			}
			wg.Wait()
		})
	}
}

// relay passes messages of the given sizes through change, and ends with the first that is cut.
func relay(to, from net.Conn, sizes []int, change func(int, []byte) []byte) {
	defer to.(*net.TCPConn).CloseWrite()
	for i, size := range sizes {
		message := make([]byte, size)
		if _, err := io.ReadFull(from, message); err != nil {
			return
		}
		message = change(i, message)
		if _, err := to.Write(message); err != nil || len(message) < size {
			return
		}
	}
	io.Copy(to, from)
}

// Whoever has no secret can send a node its own messages back, as they are or made to look like answers.
func TestReflectedHandshake(t *testing.T) {
	for name, c := range map[string]struct {
		change func([]byte)
		want   error
	}{
		"as it is":       {func([]byte) {}, ErrMalformed},
		"as a server's":  {func(b []byte) { b[8] = fromServer }, ErrReflected},
		"with new nonce": {func(b []byte) { b[8] = fromServer; b[16] ^= 1 }, ErrReflected},
	} {
		t.Run(name, func(t *testing.T) {
			client, mirror := tcptest.Pair(t)
			go func() {
				hello := make([]byte, helloSize)
				io.ReadFull(mirror, hello)
				c.change(hello)
				mirror.Write(hello)
			}()
			if _, err := Client(t.Context(), client, testConfig(t, RoleStage, "s")); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
	// A proof sent back is no verdict, even where the mirror has a share of its own.
	client, mirror := tcptest.Pair(t)
	go func() {
		hello := make([]byte, helloSize)
		io.ReadFull(mirror, hello)
		hello[8] = fromServer
		rand.NewChaCha8([32]byte{}).Read(hello[48:80])
		mirror.Write(hello)
		proof := make([]byte, proofSize)
		io.ReadFull(mirror, proof)
		body := encodeVerdict(nil)
		mirror.Write(append(body[:], proof...))
	}()
	if _, err := Client(t.Context(), client, testConfig(t, RoleStage, "s")); !errors.Is(err, ErrSecret) {
		t.Errorf("got %v", err)
	}
}

// A share of low order would make the traffic keys depend on the secret alone.
func TestLowOrderShare(t *testing.T) {
	client, server := tcptest.Pair(t)
	cfg := testConfig(t, RoleCoordinator, "c")
	go func() {
		h := sampleHello()
		h.share = [32]byte{}
		wire := h.encode()
		evil := &handshake{cfg: cfg, conn: client, transcript: make([]byte, 0, 1024)}
		evil.send("", wire[:])
		if _, err := evil.receiveHello(fromServer); err == nil {
			evil.send("", evil.sign("client proof"))
		}
		io.Copy(io.Discard, client)
	}()
	_, err := Server(t.Context(), server, testConfig(t, RoleStage, "s"), nil)
	if _, ok := errors.AsType[*HandshakeError](err); !ok || !strings.Contains(err.Error(), "agreeing on keys") {
		t.Errorf("got %v", err)
	}
}

func TestRandomBytes(t *testing.T) {
	source := rand.NewChaCha8([32]byte{1})
	for _, size := range []int{0, 1, 7, 8, 9, helloSize - 1, helloSize, helloSize + proofSize, 100_000} {
		junk := make([]byte, size)
		source.Read(junk)
		genuine := append([]byte(magic+"\x06\x00"), junk...)
		for _, wire := range [][]byte{junk, genuine, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")} {
			for end, shake := range map[string]func(net.Conn) error{
				"client": func(c net.Conn) error { _, err := Client(t.Context(), c, testConfig(t, RoleTool, "t")); return err },
				"server": func(c net.Conn) error {
					_, err := Server(t.Context(), c, testConfig(t, RoleTool, "t"), nil)
					return err
				},
			} {
				rest := bytes.NewReader(wire)
				conn := &wireConn{Reader: rest}
				err := shake(conn)
				if _, ok := errors.AsType[*HandshakeError](err); !ok || !conn.closed {
					t.Errorf("%s, %d bytes: got %v, closed %v", end, len(wire), err, conn.closed)
				}
				if read := len(wire) - rest.Len(); read > helloSize {
					t.Errorf("%s: %d bytes were read of what is no hello", end, read)
				}
			}
		}
	}
}

// However slowly bytes come, the handshake ends when its time is over, at whatever step it is.
func TestSlowHandshakes(t *testing.T) {
	h := sampleHello()
	hello := h.encode()
	for name, c := range map[string]struct {
		send  []byte
		pause time.Duration // before each byte
	}{
		"silent":                 {nil, 0},
		"one byte a second":      {hello[:], time.Second},
		"stops within hello":     {hello[:100], 0},
		"stops before its proof": {hello[:], 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, server := net.Pipe()
				var wg sync.WaitGroup
				defer wg.Wait()
				defer client.Close()
				wg.Go(func() { io.Copy(io.Discard, client) })
				wg.Go(func() {
					for i := range c.send {
						time.Sleep(c.pause)
						if _, err := client.Write(c.send[i : i+1]); err != nil {
							return
						}
					}
				})
				start := time.Now()
				_, err := Server(t.Context(), server, testConfig(t, RoleStage, "s"), nil)
				if _, ok := errors.AsType[*HandshakeError](err); !ok || time.Since(start) != DefaultHandshakeTimeout {
					t.Errorf("got %v after %s", err, time.Since(start))
				}
			})
		})
	}
}

func TestHandshakeFollowsItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stopped := errors.New("stopped")
		for end, shake := range map[string]func(context.Context, net.Conn) error{
			"client": func(ctx context.Context, c net.Conn) error {
				_, err := Client(ctx, c, testConfig(t, RoleTool, "t"))
				return err
			},
			"server": func(ctx context.Context, c net.Conn) error {
				_, err := Server(ctx, c, testConfig(t, RoleTool, "t"), nil)
				return err
			},
		} {
			ours, theirs := net.Pipe()
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(stopped) })
			start := time.Now()
			if err := shake(ctx, ours); !errors.Is(err, stopped) || time.Since(start) != time.Second {
				t.Errorf("%s: got %v after %s", end, err, time.Since(start))
			}
			if _, err := theirs.Write([]byte("x")); err != io.ErrClosedPipe {
				t.Errorf("%s: the connection is still open: %v", end, err)
			}
		}
	})
}

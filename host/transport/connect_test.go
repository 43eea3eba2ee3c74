package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/sdk"
)

func secure(t *testing.T, role securelink.Role, node string) securelink.Config {
	t.Helper()
	secret, err := securelink.NewSecret([]byte("sixteen bytes or more"))
	if err != nil {
		t.Fatal(err)
	}
	return securelink.Config{Secret: secret, Self: securelink.Identity{Role: role, NodeID: node, Cluster: "test", Version: "v1"}}
}

// serve runs a port until the test ends; every connection says its kind and goes.
func serve(t *testing.T, node string, refused func(net.Addr, error)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	secured, err := securelink.NewListener(l, securelink.ListenerConfig{Config: secure(t, securelink.RoleStage, node)})
	if err != nil {
		t.Fatal(err)
	}
	handler := func(name string) func(context.Context, *Conn) {
		return func(_ context.Context, c *Conn) {
			defer c.Close()
			fmt.Fprintf(c, "%s %s %s", name, c.Opening.Session, c.Opening.Place)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		done <- Serve(ctx, secured, Handlers{KindControl: handler("control"), KindLink: handler("link")}, refused)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func TestDispatch(t *testing.T) {
	refused := make(chan error, 8)
	address := serve(t, "b", func(_ net.Addr, err error) { refused <- err })
	d := Dialer{Secure: secure(t, securelink.RoleCoordinator, "a")}
	for o, want := range map[Opening]string{
		{Kind: KindControl, Session: Session{0xab, 1}}:          "control ab010000 0",
		{Kind: KindLink, Place: sdk.Place{Stage: 515, Rank: 7}}: "link 00000000 515.7",
	} {
		c, err := d.Connect(t.Context(), []string{address}, o, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if err != nil || string(got) != want {
			t.Errorf("%v: %q, %v, want %q", o.Kind, got, err, want)
		}
		if sent, received := c.Traffic(); sent != 0 || received != int64(len(want)) {
			t.Errorf("%v: %d sent and %d received", o.Kind, sent, received)
		}
		c.Close()
	}
	for o, want := range map[Opening]string{
		{Kind: KindStatus}: "does not serve",
		{Kind: 'X'}:        "kind 0x58",
	} {
		c, err := d.Connect(t.Context(), []string{address}, o, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("%v is served", o.Kind)
		}
		c.Close()
		if err := <-refused; !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", o.Kind, err, want)
		}
	}
}

// The first address that leads to the right node is taken, however many lead nowhere or hang.
func TestConnectTriesAllCandidates(t *testing.T) {
	right, wrong := serve(t, "right", nil), serve(t, "wrong", nil)
	dial := func(ctx context.Context, address string) (net.Conn, error) {
		switch address {
		case "hangs":
			<-ctx.Done()
			return nil, context.Cause(ctx)
		case "nowhere":
			return nil, errors.New("no route")
		}
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}
	accept := func(id securelink.Identity) error {
		if id.NodeID != "right" {
			return fmt.Errorf("node %q answers", id.NodeID)
		}
		return nil
	}
	d := Dialer{Secure: secure(t, securelink.RoleStage, "a"), Dial: dial, Stagger: 1}
	c, err := d.Connect(t.Context(), []string{"nowhere", "hangs", wrong, right}, Opening{Kind: KindLink}, accept)
	if err != nil {
		t.Fatal(err)
	}
	if c.Address != right || c.Peer().NodeID != "right" {
		t.Errorf("connected to %q at %s", c.Peer().NodeID, c.Address)
	}
	c.Close()

	_, err = d.Connect(t.Context(), []string{"nowhere", wrong}, Opening{Kind: KindLink}, accept)
	var failed *DialError
	if !errors.As(err, &failed) || len(failed.Attempts) != 2 || err.Error() != fmt.Sprintf(`nowhere: no route; %s: node "wrong" answers`, wrong) {
		t.Errorf("%v, want a *DialError that tells of both", err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	d.Dial = func(ctx context.Context, _ string) (net.Conn, error) {
		cancel()
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	if _, err := d.Connect(ctx, []string{"a", "b"}, Opening{Kind: KindLink}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
	if _, err := d.Connect(t.Context(), nil, Opening{Kind: KindLink}, nil); !errors.As(err, &failed) {
		t.Errorf("%v, want a *DialError", err)
	}
}

// A refusal of the handshake is found in the error.
func TestConnectTellsRefusals(t *testing.T) {
	address := serve(t, "b", nil)
	cfg := secure(t, securelink.RoleCoordinator, "a")
	var err error
	if cfg.Secret, err = securelink.NewSecret([]byte("another sixteen bytes")); err != nil {
		t.Fatal(err)
	}
	if _, err = (Dialer{Secure: cfg}).Connect(t.Context(), []string{address}, Opening{Kind: KindControl}, nil); !errors.Is(err, securelink.ErrSecret) {
		t.Errorf("%v, want %v", err, securelink.ErrSecret)
	}
}

func FuzzOpening(f *testing.F) {
	f.Add(Opening{Kind: KindLink, Session: Session{1, 2}, Place: sdk.Place{Stage: 3, Rank: 1}}.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var raw [openingSize]byte
		copy(raw[:], b)
		o, err := parseOpening(&raw)
		if (err == nil) != o.Kind.known() {
			t.Fatalf("%+v, %v", o, err)
		}
		if err == nil && string(o.append(nil)) != string(raw[:]) {
			t.Fatalf("%x is read as %+v", raw, o)
		}
	})
}

func FuzzBeat(f *testing.F) {
	f.Add(Beat{Sequence: 1, Sent: 2, Echo: 3, Held: 4}.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var raw [beatSize]byte
		copy(raw[:], b)
		if beat := parseBeat(&raw); string(beat.append(nil)) != string(raw[:]) {
			t.Fatalf("%x is read as %+v", raw, beat)
		}
	})
}

package securelink

import (
	"bytes"
	"strings"
	"testing"
)

func sampleHello() hello {
	h := hello{sender: fromClient, identity: Identity{Role: RoleStage, NodeID: "stage-0", Cluster: "größe", Version: "v0.8.0"}}
	for i := range h.nonce {
		h.nonce[i], h.share[i] = byte(i), byte(100+i)
	}
	return h
}

func TestHelloRoundTrip(t *testing.T) {
	full := strings.Repeat("x", 64)
	for _, id := range []Identity{
		{Role: RoleCoordinator, NodeID: "a"},
		{Role: RoleStage, NodeID: "stage-0", Cluster: "größe", Version: "v0.8.0"},
		{Role: RoleTool, NodeID: full, Cluster: full, Version: full[:MaxVersion]},
	} {
		want := sampleHello()
		want.identity = id
		wire := want.encode()
		got, err := decodeHello(&wire, fromClient)
		if err != nil || *got != want {
			t.Errorf("%+v: got %+v, %v", want, got, err)
		}
	}
}

func TestMalformedHello(t *testing.T) {
	for name, change := range map[string]func(*[helloSize]byte){
		"from a server":            func(b *[helloSize]byte) { b[8] = fromServer },
		"from nobody":              func(b *[helloSize]byte) { b[8] = 0 },
		"no role":                  func(b *[helloSize]byte) { b[9] = 0 },
		"unknown role":             func(b *[helloSize]byte) { b[9] = 4 },
		"no node id":               func(b *[helloSize]byte) { b[10] = 0; clear(b[80:144]) },
		"node id too long":         func(b *[helloSize]byte) { b[10] = 65 },
		"node id shorter":          func(b *[helloSize]byte) { b[10]-- },
		"cluster name too long":    func(b *[helloSize]byte) { b[11] = 255 },
		"version too long":         func(b *[helloSize]byte) { b[12] = 33 },
		"reserved":                 func(b *[helloSize]byte) { b[15] = 1 },
		"node id draws":            func(b *[helloSize]byte) { b[80] = 0x1b },
		"cluster breaks the line":  func(b *[helloSize]byte) { b[144] = '\n' },
		"cluster is cut in a rune": func(b *[helloSize]byte) { b[144] = 0xff },
		"after the version":        func(b *[helloSize]byte) { b[239] = 'x' },
	} {
		h := sampleHello()
		wire := h.encode()
		change(&wire)
		if got, err := decodeHello(&wire, fromClient); err != ErrMalformed {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
	}
}

func TestVerdictRoundTrip(t *testing.T) {
	for _, want := range []*Refusal{
		nil,
		{Code: RefusedBusy},
		{Code: RefusedCluster, Text: "cluster “a” here, “b” there"},
		{Code: 200, Text: strings.Repeat("x", MaxRefusalText)},
	} {
		wire := encodeVerdict(want)
		got, err := decodeVerdict(&wire)
		if err != nil || (got == nil) != (want == nil) || got != nil && *got != *want {
			t.Errorf("%v: got %v, %v", want, got, err)
		}
	}
}

// A decision's text is made fit rather than let the verdict fail.
func TestVerdictText(t *testing.T) {
	for in, want := range map[string]string{
		"a\nb\x1b[2J":                  "a b [2J",
		"bad \xff\xfe end":             "bad ? end",
		strings.Repeat("ä", 200):       strings.Repeat("ä", MaxRefusalText/2),
		"x" + strings.Repeat("ä", 200): "x" + strings.Repeat("ä", (MaxRefusalText-1)/2),
	} {
		wire := encodeVerdict(&Refusal{Code: RefusedOther, Text: in})
		got, err := decodeVerdict(&wire)
		if err != nil || got.Text != want {
			t.Errorf("%q: got %v, %v", in, got, err)
		}
	}
}

func TestMalformedVerdict(t *testing.T) {
	for name, change := range map[string]func(*[verdictBody]byte){
		"unknown":              func(b *[verdictBody]byte) { b[0] = 0 },
		"accepted with a code": func(b *[verdictBody]byte) { b[0] = verdictAccept },
		"busy with another":    func(b *[verdictBody]byte) { b[0] = verdictCapacity },
		"refused as busy":      func(b *[verdictBody]byte) { b[1] = byte(RefusedBusy) },
		"refused without code": func(b *[verdictBody]byte) { b[1] = 0 },
		"text too long":        func(b *[verdictBody]byte) { b[2] = 253 },
		"text shorter":         func(b *[verdictBody]byte) { b[2]-- },
		"reserved":             func(b *[verdictBody]byte) { b[3] = 1 },
		"text breaks the line": func(b *[verdictBody]byte) { b[4] = '\n' },
		"something after text": func(b *[verdictBody]byte) { b[255] = 1 },
	} {
		wire := encodeVerdict(&Refusal{Code: RefusedRole, Text: "no"})
		change(&wire)
		if got, err := decodeVerdict(&wire); err != ErrMalformed {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
}

// What decodes encodes to the same bytes: there is one way to say a thing.
func FuzzHello(f *testing.F) {
	h := sampleHello()
	wire := h.encode()
	f.Add(wire[:])
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < helloSize {
			return
		}
		wire := (*[helloSize]byte)(in)
		version, ok := decodePrefix(wire[:prefixSize])
		if !ok || version != ProtocolVersion {
			return
		}
		for _, sender := range []byte{fromClient, fromServer} {
			if got, err := decodeHello(wire, sender); err == nil {
				if again := got.encode(); again != *wire {
					t.Errorf("%x decodes to %+v, which encodes to %x", wire, got, again)
				}
				if err := got.identity.validate(); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

func FuzzVerdict(f *testing.F) {
	for _, r := range []*Refusal{nil, {Code: RefusedBusy}, {Code: RefusedOther, Text: "why"}} {
		wire := encodeVerdict(r)
		f.Add(wire[:])
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < verdictBody {
			return
		}
		wire := (*[verdictBody]byte)(in)
		got, err := decodeVerdict(wire)
		if err != nil {
			return
		}
		if again := encodeVerdict(got); !bytes.Equal(again[:], wire[:]) {
			t.Errorf("%x decodes to %v, which encodes to %x", wire, got, again)
		}
	})
}

package sdk

import (
	"bytes"
	"encoding"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/proto"
)

type encoded interface {
	encoding.BinaryMarshaler
	encoding.BinaryUnmarshaler
}

func TestEncodingRoundTrip(t *testing.T) {
	profile := filled[*ModelProfile]()
	profile.Adjacency = []AdjacencyGroup{{Source: 0, Consumer: 1, Reason: "shared cache"}}
	for _, in := range []encoded{filled[*Description](), filled[*Device](), filled[*Family](), profile, filled[*LoadProgress](), filled[*LoadReport](), filled[*Error]()} {
		t.Run(fmt.Sprintf("%T", in), func(t *testing.T) {
			b, err := in.MarshalBinary()
			if err != nil {
				t.Fatal(err)
			}
			out := reflect.New(reflect.TypeOf(in).Elem()).Interface().(encoded)
			if err := out.UnmarshalBinary(b); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(in, out) {
				t.Errorf("%+v became %+v", in, out)
			}
		})
	}
}

// TestEncodingRefused reads what no correct host sends, which must leave the value as it was.
func TestEncodingRefused(t *testing.T) {
	message := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, c := range map[string]struct {
		b    []byte
		into encoded
		want string
	}{
		"no message":              {[]byte{0xff}, &Family{}, "decode a family"},
		"a text that is no UTF-8": {[]byte{0x0a, 1, 0xff}, &Family{}, "decode a family"},
		"a negative memory":       {message(&pb.Device{TotalMemory: -1}), &Device{}, "device memory"},
		"negative memory within":  {message(&pb.Description{Devices: []*pb.Device{{FreeMemory: -1}}}), &Description{}, "free device memory"},
		"a negative version":      {message(&pb.Description{ContractVersion: -1}), &Description{}, "contract version"},
		"a negative layer":        {message(&pb.ModelProfile{Layers: []*pb.LayerProfile{{Weights: -1}}}), &ModelProfile{}, "layer 0: weight bytes"},
		"a state of no kind":      {message(&pb.ModelProfile{Layers: []*pb.LayerProfile{{States: []*pb.StateProfile{{}}}}}), &ModelProfile{}, "layer 0: state 0: unknown kind"},
		"a negative block": {message(&pb.ModelProfile{Layers: []*pb.LayerProfile{{States: []*pb.StateProfile{{Kind: 1, Block: -1}}}}}),
			&ModelProfile{}, "layer 0: state 0: state block"},
		"a group without layers":     {message(&pb.ModelProfile{Adjacency: []*pb.AdjacencyGroup{{}}}), &ModelProfile{}, "adjacency"},
		"an unknown dtype":           {message(&pb.LoadReport{Boundary: &pb.Boundary{Dtype: 99}}), &LoadReport{}, "dtype number 99"},
		"more layers than there are": {bytes.Repeat([]byte{0x1a, 0}, MaxEncoding/2+1), &ModelProfile{}, "passes the limit"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.into.UnmarshalBinary(c.b)
			if CodeOf(err) != CodeInvalid || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one of code invalid about %q", err, c.want)
			}
			if !reflect.ValueOf(c.into).Elem().IsZero() {
				t.Errorf("it became %+v", c.into)
			}
		})
	}
}

// TestEncodingLimit holds the largest model that makes sense, and little memory for what is none.
func TestEncodingLimit(t *testing.T) {
	large := &ModelProfile{Layers: make([]LayerProfile, 1000)}
	for i := range large.Layers {
		large.Layers[i] = LayerProfile{Kind: "sliding-attention", Weights: 1 << 40, States: []StateProfile{
			{Kind: StateKV, BytesPerPosition: 1 << 20, Window: 1 << 12, Block: 1 << 8},
		}}
	}
	if _, err := large.MarshalBinary(); err != nil {
		t.Errorf("1000 layers: %v", err)
	}
	large.Family = strings.Repeat("x", MaxEncoding)
	if b, err := large.MarshalBinary(); CodeOf(err) != CodeInvalid || err == nil {
		t.Errorf("%d bytes were encoded: %v", len(b), err)
	}
	empty := bytes.Repeat([]byte{0x1a, 0}, MaxEncoding/2)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var p ModelProfile
	err := p.UnmarshalBinary(empty)
	runtime.ReadMemStats(&after)
	if err != nil || len(p.Layers) != MaxEncoding/2 {
		t.Fatalf("%d layers, %v", len(p.Layers), err)
	}
	if got := after.TotalAlloc - before.TotalAlloc; got > 16<<20 {
		t.Errorf("%d bytes of empty layers took %d bytes of memory, want at most 16 MiB", len(empty), got)
	}
}

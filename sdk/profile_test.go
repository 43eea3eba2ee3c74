package sdk

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

func TestStateProfileBytes(t *testing.T) {
	for _, c := range []struct {
		name      string
		state     StateProfile
		positions int
		want      int64
	}{
		{"nothing", StateProfile{}, 1000, 0},
		{"empty", StateProfile{BytesPerPosition: 10, Block: 64}, 0, 0},
		{"below 0", StateProfile{BytesPerPosition: 10, Block: 64, Fixed: 3}, -5, 3},
		{"one by one", StateProfile{BytesPerPosition: 10}, 7, 70},
		{"a block begun", StateProfile{BytesPerPosition: 10, Block: 64}, 1, 640},
		{"a block full", StateProfile{BytesPerPosition: 10, Block: 64}, 64, 640},
		{"the next block", StateProfile{BytesPerPosition: 10, Block: 64}, 65, 1280},
		{"a large block", StateProfile{BytesPerPosition: 10, Block: 256}, 257, 5120},
		{"before the window", StateProfile{BytesPerPosition: 10, Block: 64, Window: 192}, 128, 1280},
		{"the window full", StateProfile{BytesPerPosition: 10, Block: 64, Window: 192}, 129, 1920},
		{"past the window", StateProfile{BytesPerPosition: 10, Block: 64, Window: 192}, 1 << 30, 1920},
		{"a window within a block", StateProfile{BytesPerPosition: 10, Block: 64, Window: 100}, 65, 1000},
		{"fixed", StateProfile{Fixed: 77}, 12345, 77},
		{"both", StateProfile{Fixed: 77, BytesPerPosition: 1, Block: 4}, 5, 85},
		{"a product too large", StateProfile{BytesPerPosition: math.MaxInt64 / 2}, 3, math.MaxInt64},
		{"a sum too large", StateProfile{BytesPerPosition: 1, Fixed: math.MaxInt64}, 1, math.MaxInt64},
		{"a length too large to round up", StateProfile{BytesPerPosition: 1, Block: 64}, math.MaxInt, math.MaxInt64},
		{"a window makes any length small", StateProfile{BytesPerPosition: 2, Block: 64, Window: 64}, math.MaxInt, 128},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.state.Bytes(c.positions); got != c.want {
				t.Errorf("%+v at %d positions: %d bytes, want %d", c.state, c.positions, got, c.want)
			}
		})
	}
}

// A layer's states don't hide each other: one window, one without, one of fixed size.
func TestLayerProfileStateBytes(t *testing.T) {
	l := LayerProfile{States: []StateProfile{
		{Kind: StateKV, BytesPerPosition: 10, Block: 64, Window: 128}, {Kind: StateLatent, BytesPerPosition: 3, Block: 64}, {Kind: StateRecurrent, Fixed: 1000},
	}}
	for _, c := range []struct {
		positions, snapshots int
		want                 int64
	}{
		{0, 0, 1000}, {1, 0, 1000 + 640 + 192}, {128, 0, 1000 + 1280 + 384}, {1280, 0, 1000 + 1280 + 3840},
		{1280, 2, 3000 + 1280 + 3840}, {0, -1, 1000}, {0, math.MaxInt, math.MaxInt64}, {math.MaxInt, 0, math.MaxInt64},
	} {
		if got := l.StateBytes(c.positions, c.snapshots); got != c.want {
			t.Errorf("%d positions, %d snapshots: %d bytes, want %d", c.positions, c.snapshots, got, c.want)
		}
	}
	if got := (LayerProfile{}).StateBytes(100, 3); got != 0 {
		t.Errorf("a layer without states takes %d bytes", got)
	}
}

// The formula is what a cache of blocks does, position by position: it never shrinks, grows by at most a block, holds what
// it must, and stays within its window.
func TestStateProfileProperties(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 3))
		s := StateProfile{BytesPerPosition: rng.Int64N(100), Block: rng.IntN(70), Fixed: rng.Int64N(1000)}
		block := max(1, s.Block)
		if rng.IntN(2) == 0 {
			s.Window = block * (1 + rng.IntN(5))
		}
		capacity := 0
		for n := range 500 {
			if n > capacity && (s.Window == 0 || capacity < s.Window) {
				capacity += block
			}
			if got, want := s.Bytes(n), s.Fixed+s.BytesPerPosition*int64(capacity); got != want {
				t.Fatalf("seed %d: %+v at %d positions: %d bytes, want %d", seed, s, n, got, want)
			}
		}
		for range 100 { // whatever the numbers, more is not less
			wild := StateProfile{BytesPerPosition: rng.Int64(), Block: rng.IntN(math.MaxInt), Window: rng.IntN(2) * rng.IntN(math.MaxInt), Fixed: rng.Int64()}
			a, b := rng.IntN(math.MaxInt), rng.IntN(math.MaxInt)
			if low, high := wild.Bytes(min(a, b)), wild.Bytes(max(a, b)); low < wild.Fixed || high < low {
				t.Fatalf("seed %d: %+v takes %d bytes at %d positions and %d at %d", seed, wild, low, min(a, b), high, max(a, b))
			}
		}
	}
}

func TestProfileDiff(t *testing.T) {
	base := func() *ModelProfile {
		return &ModelProfile{
			Family: "toy", Boundary: Boundary{Width: 8, Dtype: DtypeBFloat16}, Adjacency: []AdjacencyGroup{{0, 1, "shared"}},
			Layers: []LayerProfile{{Kind: "attention", Weights: 10, States: []StateProfile{{Kind: StateKV, Block: 64}}}, {Kind: "attention", Weights: 10}},
		}
	}
	for _, c := range []struct {
		name   string
		change func(*ModelProfile)
		want   []string
	}{
		{"equal", func(*ModelProfile) {}, nil},
		{"boundary", func(p *ModelProfile) { p.Boundary.Dtype = DtypeFloat32 }, []string{"Boundary.Dtype float32, want bfloat16"}},
		{"text", func(p *ModelProfile) { p.Quantization = "none" }, []string{`Quantization "none", want ""`}},
		{"a block", func(p *ModelProfile) { p.Layers[0].States[0].Block = 256 }, []string{"Layers[0].States[0].Block 256, want 64"}},
		{"states", func(p *ModelProfile) { p.Layers[0].States = nil }, []string{"number of Layers[0].States 0, want 1"}},
		{"a group", func(p *ModelProfile) { p.Adjacency[0].Consumer = 2 }, []string{"Adjacency[0].Consumer 2, want 1"}},
		{"several", func(p *ModelProfile) { p.Family, p.Exact, p.Head, p.VocabSize = "x", true, 1, 2 },
			[]string{`Family "x", want "toy"`, "Head 1, want 0", "VocabSize 2, want 0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := base()
			c.change(got)
			var texts []string
			for _, d := range base().Diff(got) {
				texts = append(texts, d.String())
			}
			if !slices.Equal(texts, c.want) {
				t.Errorf("%q, want %q", texts, c.want)
			}
		})
	}
}

// Whatever field a profile has, Diff looks at it: filled profiles of other numbers differ in their first fields.
func TestProfileDiffSeesEveryField(t *testing.T) {
	leaves := 0
	var walk func(p *ModelProfile, v reflect.Value)
	walk = func(p *ModelProfile, v reflect.Value) {
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				walk(p, v.Field(i))
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(p, v.Index(i))
			}
		default:
			leaves++
			want, old := filled[ModelProfile](), reflect.ValueOf(v.Interface())
			v.SetZero()
			if diff := want.Diff(p); len(diff) != 1 {
				t.Errorf("a profile with one field changed from %v differs in %v", old, diff)
			}
			v.Set(old)
		}
	}
	p := filled[ModelProfile]()
	walk(&p, reflect.ValueOf(&p).Elem())
	if leaves < 30 {
		t.Errorf("only %d fields were looked at", leaves)
	}
}

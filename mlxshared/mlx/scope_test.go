package mlx

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

func TestDtype(t *testing.T) {
	for d := Bool; d <= Complex64; d++ {
		back, err := ParseDtype(d.String())
		if err != nil || back != d {
			t.Errorf("%s parses as %s, %v", d, back, err)
		}
	}
	if BFloat16.Size() != 2 || Float32.Size() != 4 || Complex64.Size() != 8 || Dtype(99).Size() != 0 {
		t.Error("wrong sizes")
	}
	if !BFloat16.IsFloat() || Int32.IsFloat() || Complex64.IsFloat() {
		t.Error("wrong kinds")
	}
	if _, err := ParseDtype("float8"); err == nil {
		t.Error("float8 parses")
	}
}

func TestBytesRoundTrip(t *testing.T) {
	c := scope(t, open(t, Options{}))
	for d := Bool; d <= Complex64; d++ {
		data := make([]byte, 6*d.Size())
		for i := range data {
			data[i] = byte(i % 2)
		}
		a := c.FromBytes(data, d, 2, 3)
		if !equalInts(a.Shape(), []int{2, 3}) || a.Dtype() != d || a.Size() != 6 || a.NBytes() != len(data) || a.NDim() != 2 {
			t.Errorf("%s: shape %v, dtype %s", d, a.Shape(), a.Dtype())
		}
		got, err := c.Bytes(a)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: got %v, %v, want %v", d, got, err, data)
		}
	}
	if a := c.FromBytes(nil, Float32, 0, 4); a.Size() != 0 || c.Err() != nil {
		t.Errorf("empty array: size %d, %v", a.Size(), c.Err())
	}
}

func TestZeroArray(t *testing.T) {
	var a Array
	if !a.IsZero() || a.Shape() != nil || a.Dim(0) != 0 || a.Size() != 0 || a.NDim() != 0 || a.NBytes() != 0 || a.Dtype() != Bool {
		t.Error("the zero array has properties")
	}
	a.Free()
}

func TestStridedCopyOut(t *testing.T) {
	c := scope(t, open(t, Options{}))
	a := c.FromFloat32s([]float32{1, 2, 3, 4, 5, 6}, 2, 3)
	close32(t, "transpose", values(t, c, c.Transpose(a)), []float32{1, 4, 2, 5, 3, 6}, 0)
	close32(t, "columns", values(t, c, c.SliceAxis(a, 1, 1, 3)), []float32{2, 3, 5, 6}, 0)
	if got, err := c.Elements(c.Transpose(a)); err != nil {
		t.Error(err)
	} else {
		close32(t, "elements", got, []float32{1, 4, 2, 5, 3, 6}, 0)
	}
	ints, err := c.Int32s(a)
	if err != nil || ints[5] != 6 {
		t.Errorf("int32s: %v, %v", ints, err)
	}
}

func TestStickyError(t *testing.T) {
	c := scope(t, open(t, Options{}))
	a := c.FromFloat32s([]float32{1, 2, 3}, 3)
	b := c.FromFloat32s([]float32{1, 2}, 2)
	if bad := c.Add(a, b); !bad.IsZero() {
		t.Error("a failed operation returns an array")
	}
	if later := c.Mul(a, a); !later.IsZero() {
		t.Error("an operation after a failure returns an array")
	}
	var op *OpError
	if err := c.Eval(a); !errors.As(err, &op) || err != c.Err() {
		t.Fatalf("eval returns %v", err)
	}
	if op.Op != "add" || op.Inputs != "float32[3], float32[2]" || !strings.Contains(op.Reason, "broadcast") {
		t.Errorf("error is %q of %q: %q", op.Op, op.Inputs, op.Reason)
	}
	if err := c.CopyTo(a, make([]byte, 12)); err != c.Err() {
		t.Errorf("copy returns %v", err)
	}
}

func TestOwnership(t *testing.T) {
	s := open(t, Options{})
	before := LiveArrays()
	c := s.NewScope()
	a := c.FromFloat32s([]float32{1, 2}, 2)
	b := c.Add(a, a)
	d := c.Mul(b, b)
	if n := LiveArrays() - before; n != 3 {
		t.Fatalf("%d arrays live, want 3", n)
	}
	kept := c.Keep(b)
	c.Keep(b) // twice is harmless
	if err := c.Eval(d); err != nil {
		t.Fatal(err)
	}
	c.Close()
	c.Close()
	if n := LiveArrays() - before; n != 1 {
		t.Fatalf("%d arrays live after close, want the kept one", n)
	}
	next := s.NewScope()
	close32(t, "kept", values(t, next, kept), []float32{2, 4}, 0)
	next.Adopt(kept)
	next.Close()
	if n := LiveArrays() - before; n != 0 {
		t.Fatalf("%d arrays live at the end", n)
	}
}

func TestFree(t *testing.T) {
	s := open(t, Options{})
	before := LiveArrays()
	c := s.NewScope()
	c.FromInt32s([]int32{1}, 1).Free() // the scope forgets it
	c.FromInt32s([]int32{1}, 1)
	kept := c.Keep(c.FromInt32s([]int32{5}, 1))
	c.Close()
	kept.Free()
	if n := LiveArrays() - before; n != 0 {
		t.Errorf("%d arrays live", n)
	}
}

func TestUseAfterClose(t *testing.T) {
	s := open(t, Options{})
	c := s.NewScope()
	c.Close()
	if a := full(c, 1, Float32, 2); !a.IsZero() || !errors.Is(c.Err(), ErrClosed) {
		t.Errorf("operation on a closed scope: %v", c.Err())
	}
	if err := c.Eval(); !errors.Is(err, ErrClosed) {
		t.Errorf("eval on a closed scope: %v", err)
	}
	c = s.NewScope()
	kept := c.Keep(full(c, 1, Float32, 2))
	defer kept.Free()
	c.Close()
	if _, err := c.Elements(kept); !errors.Is(err, ErrClosed) {
		t.Errorf("elements on a closed scope: %v", err)
	}
}

// Every operation names itself and the shapes that it was given.
func TestOperationErrors(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		kv, err := s.NewKVCache(2, 4, 4, Float32)
		if err != nil {
			t.Fatal(err)
		}
		defer kv.Free()
		wide, err := s.NewKVCache(2, 8, 4, Float32)
		if err != nil {
			t.Fatal(err)
		}
		defer wide.Free()
		weights := scope(t, s)
		f := func(shape ...int) Array { return full(weights, 0.5, Float32, shape...) }
		ints := func(shape ...int) Array { return full(weights, 0, Int32, shape...) }
		words := func(shape ...int) Array { return full(weights, 0, Uint32, shape...) }
		bytes := func(shape ...int) Array { return full(weights, 0, Uint8, shape...) }
		half := full(weights, 0, Float16, 2, 1)
		rope := &RopeSpec{HeadDim: 4, RotDim: 4, InvFreq: f(2), Scale: 1}
		spec := AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 4, ValueDim: 4, Scale: 1}
		with := func(change func(*AttentionSpec)) *AttentionSpec {
			s := spec
			change(&s)
			return &s
		}
		attend := func(c *Scope, spec *AttentionSpec, segs ...Segment) {
			c.Attention(f(3, 16), f(3, 8), f(3, 8), spec, segs)
		}
		tests := []struct {
			name string
			run  func(*Scope)
			want []string
		}{
			{"from bytes, short", func(c *Scope) { c.FromBytes(make([]byte, 3), Float32, 1) }, []string{"from_bytes", "3 bytes for float32[1], want 4"}},
			{"from bytes, negative", func(c *Scope) { c.FromBytes(nil, Float32, -1) }, []string{"negative dimension in [-1]"}},
			{"from bytes, huge", func(c *Scope) { c.FromBytes(nil, Float32, 1<<30, 1<<30, 1<<30) }, []string{"overflows"}},
			{"from bytes, dtype", func(c *Scope) { c.FromBytes(nil, Dtype(77), 1) }, []string{"77 is no dtype"}},
			{"beyond 32 bits", func(c *Scope) { c.Reshape(f(1), 1<<40) }, []string{"reshape", "beyond 32 bits"}},
			{"too many dimensions", func(c *Scope) { c.Reshape(f(1), 1, 1, 1, 1, 1, 1, 1, 1, 1) }, []string{"reshape", "9 dimensions"}},
			{"copy out", func(c *Scope) { _ = c.CopyTo(f(2), make([]byte, 7)) }, []string{"copy_to(float32[2])", "7 bytes, want 8"}},
			{"elements", func(c *Scope) { _, _ = c.Elements(ints(2)) }, []string{"elements(int32)", "want float32"}},
			{"elements of the zero array", func(c *Scope) { _, _ = c.Elements(c.SliceAxis(f(2), 0, 0, 3)) }, []string{"slice("}},
			{"zero array", func(c *Scope) { c.Add(f(2), Array{}) }, []string{"add(float32[2], none)", "right side is the zero array"}},
			{"eval zero array", func(c *Scope) { _ = c.Eval(Array{}) }, []string{"eval(none)"}},
			{"reshape", func(c *Scope) { c.Reshape(f(2, 3), 4) }, []string{"reshape(float32[2,3])"}},
			{"transpose", func(c *Scope) { c.Transpose(f(2, 3), 0, 0) }, []string{"transpose(float32[2,3])"}},
			{"slice", func(c *Scope) { c.SliceAxis(f(2, 3), 0, 1, 3) }, []string{"slice(float32[2,3])", "[1, 3) of dimension 0, which has 2"}},
			{"slice axis", func(c *Scope) { c.SliceAxis(f(2), 1, 0, 1) }, []string{"axis 1 of 1"}},
			{"split", func(c *Scope) { c.SplitAxis(f(2, 3), 1, 2) }, []string{"split", "[2 3]", "by 2"}},
			{"select rows", func(c *Scope) { c.SelectRows(f(2, 3), []int32{2}) }, []string{"select_rows", "row 2 of 2"}},
			{"concat", func(c *Scope) { c.Concat(0, f(2, 3), f(2, 4)) }, []string{"concat(float32[2,3], float32[2,4])"}},
			{"concat nothing", func(c *Scope) { c.Concat(0) }, []string{"concat"}},
			{"take", func(c *Scope) { c.Take(f(2), f(2), 0) }, []string{"take(float32[2], float32[2])"}},
			{"softmax", func(c *Scope) { c.Softmax(f(2), -2, true) }, []string{"softmax(float32[2])", "axis -2"}},
			{"squeeze", func(c *Scope) { c.Squeeze(f(2), 0) }, []string{"squeeze(float32[2])"}},
			{"quantize", func(c *Scope) { c.Quantize(f(2, 33), Affine, 4, 32) }, []string{"quantize(float32[2,33])"}},
			{"quantize dense", func(c *Scope) { c.Quantize(f(2, 32), Dense, 4, 32) }, []string{"no quantized format"}},

			{"linear, width", func(c *Scope) { c.Linear(f(2, 3), &Matrix{W: f(5, 4)}, Array{}) },
				[]string{"linear(float32[2,3], float32[5,4], none, none, none)", "want rows of 4"}},
			{"linear, ints", func(c *Scope) { c.Linear(ints(2, 4), &Matrix{W: f(5, 4)}, Array{}) }, []string{"the input is int32[2,4]"}},
			{"linear, bias", func(c *Scope) { c.Linear(f(2, 4), &Matrix{W: f(5, 4)}, f(4)) }, []string{"bias is float32[4], want [5]"}},
			{"linear, no weight", func(c *Scope) { c.Linear(f(2, 4), &Matrix{}, Array{}) }, []string{"weight is the zero array"}},
			{"linear, vector weight", func(c *Scope) { c.Linear(f(2, 4), &Matrix{W: f(4)}, Array{}) }, []string{"want [rows, cols]"}},
			{"linear, dense with scales", func(c *Scope) { c.Linear(f(2, 4), &Matrix{W: f(5, 4), Scales: f(5, 1)}, Array{}) }, []string{"dense weight takes no scales"}},
			{"linear, format", func(c *Scope) { c.Linear(f(2, 4), &Matrix{Format: 9, W: f(5, 4)}, Array{}) }, []string{"9 is no weight format"}},
			{"affine, bits", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: Affine, Bits: 7, Group: 32, W: words(2, 7), Scales: f(2, 1), Biases: f(2, 1)}, Array{})
			}, []string{"bits is 7"}},
			{"affine, dtype", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: Affine, Bits: 4, Group: 32, W: f(2, 4), Scales: f(2, 1), Biases: f(2, 1)}, Array{})
			}, []string{"want uint32"}},
			{"affine, scales", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: Affine, Bits: 4, Group: 32, W: words(2, 4), Scales: f(2, 2), Biases: f(2, 1)}, Array{})
			}, []string{"scales are float32[2,2], want rows of 1 for the weight uint32[2,4]"}},
			{"affine, no biases", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: Affine, Bits: 4, Group: 32, W: words(2, 4), Scales: f(2, 1)}, Array{})
			}, []string{"no biases"}},
			{"affine, two dtypes", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: Affine, Bits: 4, Group: 32, W: words(2, 4), Scales: f(2, 1), Biases: half}, Array{})
			}, []string{"want one dtype"}},
			{"affine, group", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: Affine, Bits: 4, Group: 24, W: words(2, 4), Scales: f(2, 1), Biases: f(2, 1)}, Array{})
			}, []string{"group is 24"}},
			{"mxfp4, scales", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: MXFP4, W: words(2, 4), Scales: f(2, 1)}, Array{})
			}, []string{"mxfp4 scales are float32[2,1], want uint8"}},
			{"mxfp4, biases", func(c *Scope) {
				c.Linear(f(2, 32), &Matrix{Format: MXFP4, W: words(2, 4), Scales: bytes(2, 1), Biases: f(2, 1)}, Array{})
			}, []string{"takes no biases"}},
			{"embedding, ids", func(c *Scope) { c.Embedding(f(2), &Matrix{W: f(5, 4)}, Float32) }, []string{"embedding(float32[2], float32[5,4]", "want int32"}},
			{"embedding, dtype", func(c *Scope) { c.Embedding(ints(2), &Matrix{W: f(5, 4)}, Int8) }, []string{"output's dtype"}},
			{"embedding, nothing", func(c *Scope) { c.Embedding(ints(0), &Matrix{W: f(5, 4)}, Float32) }, []string{"no ids"}},

			{"rms norm", func(c *Scope) { c.RMSNorm(f(2, 4), f(3), 1e-5, 0) }, []string{"rms_norm(float32[2,4], float32[3])", "want [4]"}},
			{"add rms norm", func(c *Scope) { c.AddRMSNorm(f(2, 4), f(1, 4), Array{}, 1e-5, 0) }, []string{"add_rms_norm(float32[2,4], float32[1,4], none)"}},
			{"silu", func(c *Scope) { c.SiluMul(f(2, 4), f(2, 3)) }, []string{"silu_mul(float32[2,4], float32[2,3])"}},
			{"rope, width", func(c *Scope) { c.RoPE(f(2, 6), ints(2), rope) }, []string{"rope(float32[2,6], int32[2], float32[2])", "no multiple of head dim 4"}},
			{"rope, positions", func(c *Scope) { c.RoPE(f(2, 8), ints(3), rope) }, []string{"positions is int32[3], want [2]"}},
			{"rope, odd", func(c *Scope) { c.RoPE(f(2, 8), ints(2), &RopeSpec{HeadDim: 4, RotDim: 3, InvFreq: f(1)}) }, []string{"rotated 3"}},
			{"rope, frequencies", func(c *Scope) { c.RoPE(f(2, 8), ints(2), &RopeSpec{HeadDim: 4, RotDim: 4, InvFreq: f(4)}) }, []string{"want [2]"}},

			{"attention, heads", func(c *Scope) { attend(c, with(func(a *AttentionSpec) { a.Heads = 3 }), Segment{kv, 0, 3, 0}) },
				[]string{"attention(float32[3,16], float32[3,8], float32[3,8])", "3 heads over 2"}},
			{"attention, no segments", func(c *Scope) { attend(c, &spec) }, []string{"no segments"}},
			{"attention, no cache", func(c *Scope) { attend(c, &spec, Segment{nil, 0, 3, 0}) }, []string{"segment 0 has no cache"}},
			{"attention, position", func(c *Scope) { attend(c, &spec, Segment{kv, 0, 3, 5}) }, []string{"at position 5, its cache at 0"}},
			{"attention, gap", func(c *Scope) { attend(c, &spec, Segment{kv, 1, 2, 0}) }, []string{"segment 0 has rows [1, 3)"}},
			{"attention, short", func(c *Scope) { attend(c, &spec, Segment{kv, 0, 2, 0}) }, []string{"end at row 2 of 3"}},
			{"attention, twice", func(c *Scope) { attend(c, &spec, Segment{kv, 0, 1, 0}, Segment{kv, 1, 2, 0}) }, []string{"segments 0 and 1 share a cache"}},
			{"attention, other cache", func(c *Scope) { attend(c, &spec, Segment{wide, 0, 3, 0}) }, []string{"cache has 2 heads of key 8"}},
			{"attention, window", func(c *Scope) { attend(c, with(func(a *AttentionSpec) { a.Window = -1 }), Segment{kv, 0, 3, 0}) }, []string{"window -1"}},
			{"attention, sinks", func(c *Scope) { attend(c, with(func(a *AttentionSpec) { a.Sinks = f(3) }), Segment{kv, 0, 3, 0}) }, []string{"sinks is float32[3], want [4]"}},
			{"attention, only k", func(c *Scope) { c.Attention(f(3, 16), f(3, 8), Array{}, &spec, []Segment{{kv, 0, 3, 0}}) }, []string{"only one of k and v"}},
			{"attention, k", func(c *Scope) { c.Attention(f(3, 16), f(3, 9), f(3, 8), &spec, []Segment{{kv, 0, 3, 0}}) }, []string{"k is float32[3,9], want [3,8]"}},
			{"attention, shared and empty", func(c *Scope) { c.Attention(f(3, 16), Array{}, Array{}, &spec, []Segment{{kv, 0, 3, 0}}) }, []string{"its cache at -3"}},
		}
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				c := scope(t, s)
				test.run(c)
				err := c.Err()
				var op *OpError
				if !errors.As(err, &op) {
					t.Fatalf("error is %v", err)
				}
				for _, w := range test.want {
					if !strings.Contains(err.Error(), w) {
						t.Errorf("%q lacks %q", err, w)
					}
				}
			})
		}
		if kv.Len() != 0 {
			t.Errorf("refused attention moved the cache to %d", kv.Len())
		}
		if err := weights.Err(); err != nil {
			t.Error(err)
		}
	})
}

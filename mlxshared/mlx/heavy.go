package mlx

// #include "shim.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_linear
// #cgo nocallback mx_linear
// #cgo noescape mx_embedding
// #cgo nocallback mx_embedding
// #cgo noescape mx_add_rms_norm
// #cgo nocallback mx_add_rms_norm
// #cgo noescape mx_attention
// #cgo nocallback mx_attention
import "C"

// Format is how a Matrix stores its weights.
type Format uint8

// The formats, in MLX's layouts. W is uint32 for all but dense ones and packs 32/Bits values a word.
const (
	Dense  Format = iota // W [rows, cols] floating
	Affine               // Scales and Biases [rows, cols/Group] floating; Bits 2, 3, 4, 5, 6, 8
	MXFP4                // Scales uint8 E8M0 [rows, cols/32]
	MXFP8                // Scales uint8 E8M0 [rows, cols/32]
	NVFP4                // Scales uint8 E4M3 [rows, cols/16]
)

var formatNames = [...]string{"dense", "affine", "mxfp4", "mxfp8", "nvfp4"}

func (f Format) String() string {
	if int(f) < len(formatNames) {
		return formatNames[f]
	}
	return "unknown format"
}

// Matrix is a weight [output features, input features]. Bits and Group count for Affine only; the other formats fix
// them. The arrays are borrowed.
type Matrix struct {
	Format Format
	Bits   int
	Group  int
	W      Array
	Scales Array // zero for Dense
	Biases Array // of Affine; else zero
}

// Rows is the number of output features.
func (m *Matrix) Rows() int { return m.W.Dim(0) }

// Cols is the number of input features.
func (m *Matrix) Cols() int {
	packed := m.W.Dim(1)
	switch m.Format {
	case Affine:
		if m.Bits == 0 {
			return 0
		}
		return packed * 32 / m.Bits
	case MXFP4, NVFP4:
		return packed * 8
	case MXFP8:
		return packed * 4
	}
	return packed
}

// NBytes is the memory of the matrix's arrays.
func (m *Matrix) NBytes() int { return m.W.NBytes() + m.Scales.NBytes() + m.Biases.NBytes() }

func (m *Matrix) c() C.mx_matrix {
	return C.mx_matrix{
		format: C.int(m.Format), bits: C.int(m.Bits), group: C.int(m.Group),
		w: m.W.p, scales: m.Scales.p, biases: m.Biases.p,
	}
}

// Linear is x [..., cols] times w transposed plus bias [rows] (zero Array for none): [..., rows] in x's dtype.
func (s *Scope) Linear(x Array, w *Matrix, bias Array) Array {
	m := w.c()
	return s.own(C.mx_linear(s.p, x.p, &m, bias.p))
}

// Embedding is the rows ids (int32, any shape) of w: [ids..., cols] in dtype.
func (s *Scope) Embedding(ids Array, w *Matrix, dtype Dtype) Array {
	m := w.c()
	return s.own(C.mx_embedding(s.p, ids.p, &m, C.int(dtype)))
}

// RMSNorm is x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension, in x's dtype. A zero weight means
// ones. Offset is 1 for families that store weight-1, else 0. (Zhang and Sennrich 2019.)
func (s *Scope) RMSNorm(x, weight Array, eps, offset float32) Array {
	return s.own(C.mx_rms_norm(s.p, x.p, weight.p, C.float(eps), C.float(offset)))
}

// AddRMSNorm is sum = x + y, rounded to x's dtype, and RMSNorm of that sum, as one operation: a residual connection
// followed by a norm.
func (s *Scope) AddRMSNorm(x, y, weight Array, eps, offset float32) (sum, norm Array) {
	var second *C.mx_array
	sum = s.own(C.mx_add_rms_norm(s.p, x.p, y.p, weight.p, C.float(eps), C.float(offset), &second))
	return sum, Array{second}
}

// RopeSpec describes a rotary embedding (Su et al. 2021).
type RopeSpec struct {
	HeadDim     int
	RotDim      int     // leading elements of each head that rotate; even
	InvFreq     Array   // float32 [RotDim/2]: radians per position
	Scale       float32 // of the rotated elements before rotation: yarn's mscale, else 1
	Traditional bool    // rotate neighbours (2i, 2i+1), else halves (i, i+RotDim/2)
}

// RoPE rotates the heads of x [rows, heads*HeadDim] by each row's absolute position pos (int32 [rows]).
func (s *Scope) RoPE(x, pos Array, r *RopeSpec) Array {
	return s.own(C.mx_rope(s.p, x.p, pos.p, r.InvFreq.p, C.int(r.HeadDim), C.int(r.RotDim), C.float(r.Scale), C.bool(r.Traditional)))
}

// SiluMul is silu(gate) · up, of equal shape and dtype.
func (s *Scope) SiluMul(gate, up Array) Array { return s.own(C.mx_silu_mul(s.p, gate.p, up.p)) }

// AttentionSpec describes a layer's attention.
type AttentionSpec struct {
	Heads, KVHeads    int     // Heads is a multiple of KVHeads: head h reads key head h / (Heads/KVHeads)
	HeadDim, ValueDim int     // elements of a query or key head, and of a value head
	Scale             float32 // of the scores, commonly 1/sqrt(HeadDim)
	Window            int     // last positions that a row sees, itself included; 0 for all
	Softcap           float32 // scores become softcap·tanh(score/softcap); 0 for none
	Chunk             int     // a row sees its own chunk of that many positions only; 0 for all. Excludes Window, Softcap and Sinks
	Sinks             Array   // float32 [Heads]: one more logit in each head's softmax denominator; zero for none
}

// Segment is one sequence's share of a micro-batch: the rows [Row0, Row0+Rows) are its positions Pos, Pos+1, …
type Segment struct {
	Cache *KVCache
	Row0  int
	Rows  int
	Pos   int // must equal Cache.Len(), or with zero k and v, Cache.Len()-Rows
}

// Attention appends each segment's rows of k [rows, KVHeads*HeadDim] and v [rows, KVHeads*ValueDim] to its cache and
// attends causally with q [rows, Heads*HeadDim]: [rows, Heads*ValueDim] in q's dtype. The segments cover every row once,
// in order. With zero k and v the caches already hold these positions (layers that share another layer's cache).
// Latent caches take no v.
func (s *Scope) Attention(q, k, v Array, spec *AttentionSpec, segments []Segment) Array {
	first, n := s.segments(segments)
	c := spec.c()
	return s.own(C.mx_attention(s.p, q.p, k.p, v.p, &c, first, n))
}

// segments views segments as the C side's array, which the next call overwrites.
func (s *Scope) segments(segments []Segment) (*C.mx_segment, C.int) {
	s.segs = s.segs[:0]
	for _, g := range segments {
		var kv *C.mx_kv
		if g.Cache != nil {
			kv = g.Cache.p
		}
		s.segs = append(s.segs, C.mx_segment{kv: kv, row0: C.int64_t(g.Row0), rows: C.int64_t(g.Rows), pos: C.int64_t(g.Pos)})
	}
	if len(s.segs) == 0 {
		return nil, 0
	}
	return &s.segs[0], C.int(len(s.segs))
}

func (a *AttentionSpec) c() C.mx_attention_spec {
	return C.mx_attention_spec{
		heads: C.int(a.Heads), kv_heads: C.int(a.KVHeads), head_dim: C.int(a.HeadDim), value_dim: C.int(a.ValueDim),
		scale: C.float(a.Scale), window: C.int64_t(a.Window), softcap: C.float(a.Softcap), chunk: C.int64_t(a.Chunk), sinks: a.Sinks.p,
	}
}

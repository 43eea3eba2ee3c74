// Package cpu owns the CPU kernels of the operations that carry a transformer's work; kernels.h is their contract.
//
// The Go side is thin: it hands slices to the C functions. The back end on these kernels calls the C functions directly and
// imports this package only so that it is linked.
package cpu

/*
#cgo CXXFLAGS: -O3 -std=c++20
#cgo linux LDFLAGS: -lm -lpthread
#include <stdlib.h>
#include "kernels.h"

// Go memory may be passed to C, but not structs in Go memory that point to more of it: the structs are built here.
static mk_matrix matrix(mk_format format, mk_dtype dtype, int bits, int group, int64_t rows, int64_t cols,
                        const void *data, const void *scales, const void *biases) {
  mk_matrix w = {format, dtype, bits, group, rows, cols, data, scales, biases};
  return w;
}

static const char *go_check(mk_format f, mk_dtype t, int bits, int group, int64_t rows, int64_t cols, const void *data,
                            const void *scales, const void *biases) {
  mk_matrix w = matrix(f, t, bits, group, rows, cols, data, scales, biases);
  return mk_matrix_check(&w);
}

static mk_result go_linear(mk_pool *p, mk_format f, mk_dtype t, int bits, int group, int64_t rows, int64_t cols,
                           const void *data, const void *scales, const void *biases, const void *bias, mk_dtype bias_dtype,
                           const void *x, mk_dtype xt, void *y, int64_t m) {
  mk_matrix w = matrix(f, t, bits, group, rows, cols, data, scales, biases);
  return mk_linear(p, &w, bias, bias_dtype, x, xt, y, m);
}

static mk_result go_embed(mk_pool *p, mk_format f, mk_dtype t, int bits, int group, int64_t rows, int64_t cols,
                          const void *data, const void *scales, const void *biases, const int32_t *ids, int64_t n, void *y,
                          mk_dtype yt) {
  mk_matrix w = matrix(f, t, bits, group, rows, cols, data, scales, biases);
  return mk_embed(p, &w, ids, n, y, yt);
}

static void go_dequantize_row(mk_format f, mk_dtype t, int bits, int group, int64_t rows, int64_t cols,
                              const void *data, const void *scales, const void *biases, int64_t r, float *out) {
  mk_matrix w = matrix(f, t, bits, group, rows, cols, data, scales, biases);
  mk_dequantize_row(&w, r, out);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// DType is the type of a tensor's elements.
type DType int

// The element types that the kernels take.
const (
	F32  DType = C.MK_F32
	F16  DType = C.MK_F16
	BF16 DType = C.MK_BF16
)

// Size is an element's size in bytes.
func (t DType) Size() int {
	if t == F32 {
		return 4
	}
	return 2
}

func (t DType) String() string {
	switch t {
	case F32:
		return "float32"
	case F16:
		return "float16"
	case BF16:
		return "bfloat16"
	}
	return fmt.Sprintf("dtype %d", int(t))
}

// ISA is an instruction set.
type ISA int

// The instruction sets. Auto is the best that the machine runs.
const (
	Auto   ISA = C.MK_ISA_AUTO
	Plain  ISA = C.MK_ISA_PLAIN
	AVX2   ISA = C.MK_ISA_AVX2
	AVX512 ISA = C.MK_ISA_AVX512
	NEON   ISA = C.MK_ISA_NEON
)

var isaNames = [...]string{Auto: "auto", Plain: "plain", AVX2: "avx2", AVX512: "avx512", NEON: "neon"}

func (i ISA) String() string {
	if i < 0 || int(i) >= len(isaNames) {
		return fmt.Sprintf("isa %d", int(i))
	}
	return isaNames[i]
}

// BestISA is the best instruction set that this machine runs.
func BestISA() ISA { return ISA(C.mk_best_isa()) }

// Format says how a matrix stores its weights.
type Format int

// The weight formats, in MLX's layouts.
const (
	Dense  Format = C.MK_DENSE
	Affine Format = C.MK_AFFINE
	MXFP4  Format = C.MK_MXFP4
	MXFP8  Format = C.MK_MXFP8
	NVFP4  Format = C.MK_NVFP4
)

// Matrix is a weight matrix [Rows, Cols], output features by input features. Its bytes are borrowed for each call.
type Matrix struct {
	Format               Format
	DType                DType // of Data if dense, of Scales and Biases if affine
	Bits, Group          int   // quantized formats only
	Rows, Cols           int
	Data, Scales, Biases []byte
}

// Check says why the kernels cannot run the matrix; nil if they can. It does not look at the lengths of the slices.
func (m *Matrix) Check() error {
	why := C.go_check(C.mk_format(m.Format), C.mk_dtype(m.DType), C.int(m.Bits), C.int(m.Group), C.int64_t(m.Rows),
		C.int64_t(m.Cols), pointer(m.Data), pointer(m.Scales), pointer(m.Biases))
	if why == nil {
		return nil
	}
	return fmt.Errorf("matrix [%d, %d]: %s", m.Rows, m.Cols, C.GoString(why))
}

// DequantizeRow writes the float32 values of row r to out, which has Cols elements.
func (m *Matrix) DequantizeRow(r int, out []float32) {
	C.go_dequantize_row(C.mk_format(m.Format), C.mk_dtype(m.DType), C.int(m.Bits), C.int(m.Group), C.int64_t(m.Rows),
		C.int64_t(m.Cols), pointer(m.Data), pointer(m.Scales), pointer(m.Biases), C.int64_t(r),
		(*C.float)(unsafe.Pointer(unsafe.SliceData(out))))
}

// NoMemoryError says how many bytes a kernel could not have; 1 where nobody knows.
type NoMemoryError int64

func (e NoMemoryError) Error() string {
	return fmt.Sprintf("cpu kernels: no memory for %d bytes", int64(e))
}

// ErrPosition means that positions do not fit what a KV holds.
var ErrPosition = errors.New("cpu kernels: the positions do not fit what the kv holds")

// result is the error behind an mk_result.
func result(r C.mk_result) error {
	switch {
	case r > 0:
		return NoMemoryError(r)
	case r == C.MK_POSITION:
		return ErrPosition
	}
	return nil
}

// FailAllocation lets the n-th allocation from now on fail, once; 0 lets none. It returns what was left of the last n. For tests.
func FailAllocation(n int) int { return int(C.mk_fail_allocation(C.int64_t(n))) }

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// Pool is a team of threads that runs one operation at a time.
type Pool struct{ p *C.mk_pool }

// ErrNoPool means that the machine lacks the instruction set, or that threads could not be started.
var ErrNoPool = errors.New("cpu kernels: no such pool on this machine")

// NewPool starts threads-1 threads; the caller's is the other one. Free ends them.
func NewPool(threads int, isa ISA) (*Pool, error) {
	p := C.mk_pool_new(C.int(threads), C.mk_isa(isa))
	if p == nil {
		return nil, fmt.Errorf("%w: %d threads, %v", ErrNoPool, threads, isa)
	}
	return &Pool{p}, nil
}

// Free ends the pool's threads.
func (p *Pool) Free() { C.mk_pool_free(p.p) }

// Threads counts the caller's too.
func (p *Pool) Threads() int { return int(C.mk_pool_threads(p.p)) }

// Scratch is the bytes of working memory that the threads keep between operations.
func (p *Pool) Scratch() int { return int(C.mk_pool_scratch(p.p)) }

// Release frees the working memory.
func (p *Pool) Release() { C.mk_pool_release(p.p) }

// ISA is the instruction set in use.
func (p *Pool) ISA() ISA { return ISA(C.mk_pool_isa(p.p)) }

// Linear writes y[rows, w.Rows] = x[rows, w.Cols] . w^T + bias. x and y are of type xt; bias may be nil.
func (p *Pool) Linear(w *Matrix, bias []byte, biasType DType, x []byte, xt DType, y []byte, rows int) error {
	return result(C.go_linear(p.p, C.mk_format(w.Format), C.mk_dtype(w.DType), C.int(w.Bits), C.int(w.Group), C.int64_t(w.Rows),
		C.int64_t(w.Cols), pointer(w.Data), pointer(w.Scales), pointer(w.Biases), pointer(bias), C.mk_dtype(biasType),
		pointer(x), C.mk_dtype(xt), pointer(y), C.int64_t(rows)))
}

// Embed writes row ids[i] of w to row i of y.
func (p *Pool) Embed(w *Matrix, ids []int32, y []byte, yt DType) error {
	return result(C.go_embed(p.p, C.mk_format(w.Format), C.mk_dtype(w.DType), C.int(w.Bits), C.int(w.Group), C.int64_t(w.Rows),
		C.int64_t(w.Cols), pointer(w.Data), pointer(w.Scales), pointer(w.Biases),
		(*C.int32_t)(unsafe.Pointer(unsafe.SliceData(ids))), C.int64_t(len(ids)), pointer(y), C.mk_dtype(yt)))
}

// RMSNorm normalizes rows of dim elements. weight may be nil.
func (p *Pool) RMSNorm(x []byte, xt DType, weight []byte, wt DType, weightOffset, eps float32, rows, dim int, y []byte) {
	C.mk_rms_norm(p.p, pointer(x), C.mk_dtype(xt), pointer(weight), C.mk_dtype(wt), C.float(weightOffset), C.float(eps),
		C.int64_t(rows), C.int64_t(dim), pointer(y))
}

// AddRMSNorm writes sum = x + y, rounded to t, and norm = RMSNorm of that sum. sum may be x or y; weight may be nil.
func (p *Pool) AddRMSNorm(x, y []byte, t DType, weight []byte, wt DType, weightOffset, eps float32, rows, dim int,
	sum, norm []byte) {
	C.mk_add_rms_norm(p.p, pointer(x), pointer(y), C.mk_dtype(t), pointer(weight), C.mk_dtype(wt), C.float(weightOffset),
		C.float(eps), C.int64_t(rows), C.int64_t(dim), pointer(sum), pointer(norm))
}

// RoPE describes a rotary embedding.
type RoPE struct {
	Heads, HeadDim, RotDim int
	InvFreq                []float32 // RotDim/2
	Scale                  float32
	Traditional            bool
}

// RoPE rotates x[len(pos), Heads, HeadDim] into y.
func (p *Pool) RoPE(r RoPE, x []byte, xt DType, pos []int32, y []byte) error {
	traditional := C.int(0)
	if r.Traditional {
		traditional = 1
	}
	return result(C.mk_rope(p.p, pointer(x), C.mk_dtype(xt), (*C.int32_t)(unsafe.Pointer(unsafe.SliceData(pos))),
		(*C.float)(unsafe.Pointer(unsafe.SliceData(r.InvFreq))), C.int64_t(len(pos)), C.int(r.Heads), C.int(r.HeadDim),
		C.int(r.RotDim), C.float(r.Scale), traditional, pointer(y)))
}

// SiluMul writes y = silu(gate) * up over n elements.
func (p *Pool) SiluMul(gate, up []byte, t DType, n int, y []byte) {
	C.mk_silu_mul(p.p, pointer(gate), pointer(up), C.mk_dtype(t), C.int64_t(n), pointer(y))
}

// Convert writes y = x in another dtype over n elements.
func (p *Pool) Convert(x []byte, xt DType, n int, y []byte, yt DType) {
	C.mk_convert(p.p, pointer(x), C.mk_dtype(xt), C.int64_t(n), pointer(y), C.mk_dtype(yt))
}

// BinaryOp is an operation on two elements.
type BinaryOp int

// The operations of Binary.
const (
	Add BinaryOp = C.MK_ADD
	Mul BinaryOp = C.MK_MUL
)

// Binary writes y[i] = a[i] op b[i % period] over n elements. period divides n; y may be a.
func (p *Pool) Binary(op BinaryOp, a, b []byte, t DType, n, period int, y []byte) {
	C.mk_binary(p.p, C.mk_binary_op(op), pointer(a), pointer(b), C.mk_dtype(t), C.int64_t(n), C.int64_t(period), pointer(y))
}

// BlockPositions is the number of positions of a KV block.
const BlockPositions = C.MK_KV_BLOCK

// Held counts the bytes of blocks that live, each once however many KVs share it.
type Held struct{ n *C.int64_t }

// NewHeld makes a counter; Free releases it, after every KV that counts in it.
func NewHeld() *Held { return &Held{(*C.int64_t)(C.calloc(1, C.sizeof_int64_t))} }

// Bytes is the count.
func (h *Held) Bytes() int { return int(*h.n) }

// Free releases the counter.
func (h *Held) Free() { C.free(unsafe.Pointer(h.n)) }

func (h *Held) pointer() *C.int64_t {
	if h == nil {
		return nil
	}
	return h.n
}

// KV holds one sequence's keys and values in one layer.
type KV struct {
	kv     *C.mk_kv
	k, v   int // elements of a row of keys and of values
	dtype  DType
	latent bool
}

// NewKV makes an empty KV whose blocks count in held, if there is one; Free releases it.
func NewKV(kvHeads, kDim, vDim int, t DType, held *Held) (*KV, error) {
	kv := C.mk_kv_new(C.int(kvHeads), C.int(kDim), C.int(vDim), C.mk_dtype(t), held.pointer())
	if kv == nil {
		return nil, fmt.Errorf("cpu kernels: no kv of %d heads, dims %d and %d", kvHeads, kDim, vDim)
	}
	return &KV{kv: kv, k: kvHeads * kDim, v: kvHeads * vDim, dtype: t}, nil
}

// Free releases the blocks.
func (k *KV) Free() { C.mk_kv_free(k.kv) }

// Len is one past the last position.
func (k *KV) Len() int { return int(C.mk_kv_len(k.kv)) }

// First is the first position that was not dropped.
func (k *KV) First() int { return int(C.mk_kv_first(k.kv)) }

// Bytes is the memory of the KV's blocks, shared ones in full.
func (k *KV) Bytes() int { return int(C.mk_kv_bytes(k.kv)) }

// Owed is what of Bytes the next Append copies because others share it.
func (k *KV) Owed() int { return int(C.mk_kv_owed(k.kv)) }

// Truncate drops positions from length on.
func (k *KV) Truncate(length int) { C.mk_kv_truncate(k.kv, C.int64_t(length)) }

// DropBefore frees whole blocks before pos.
func (k *KV) DropBefore(pos int) { C.mk_kv_drop_before(k.kv, C.int64_t(pos)) }

// Share makes a KV of the first keep positions; blocks are shared until one side writes.
func (k *KV) Share(keep int) (*KV, error) {
	kv := C.mk_kv_share(k.kv, C.int64_t(keep))
	if kv == nil {
		return nil, fmt.Errorf("cpu kernels: can't share %d positions of %d: no memory, or not so many", keep, k.Len())
	}
	shared := *k
	shared.kv = kv
	return &shared, nil
}

// Begin lets an empty KV begin at position first.
func (k *KV) Begin(first int) error { return result(C.mk_kv_begin(k.kv, C.int64_t(first))) }

// Read copies n positions from pos on; values is nil for a latent KV.
func (k *KV) Read(pos, n int) (keys, values []byte, err error) {
	keys = make([]byte, max(0, n)*k.k*k.dtype.Size())
	if !k.latent {
		values = make([]byte, max(0, n)*k.v*k.dtype.Size())
	}
	return keys, values, result(C.mk_kv_read(k.kv, C.int64_t(pos), C.int64_t(n), pointer(keys), pointer(values)))
}

// Append adds n positions from pos on.
func (k *KV) Append(pos int, keys, values []byte, n int) error {
	if err := result(C.mk_kv_append(k.kv, C.int64_t(pos), pointer(keys), pointer(values), C.int64_t(n))); err != nil {
		return fmt.Errorf("appending at %d of %d: %w", pos, k.Len(), err)
	}
	return nil
}

// Segment is one sequence's share of an attention call: N rows from Row on, at positions from Pos on.
type Segment struct {
	KV          *KV
	Row, N, Pos int
}

// Attention describes a causal attention.
type Attention struct {
	Heads   int
	Scale   float32
	Window  int // positions seen, the own one included; 0 for all
	Softcap float32
	Sinks   []float32 // per head, or nil
}

// Attention writes y[rows, Heads, vDim].
func (p *Pool) Attention(a Attention, q []byte, t DType, segments []Segment, y []byte) error {
	segs := make([]C.mk_segment, len(segments))
	for i, s := range segments {
		segs[i] = C.mk_segment{kv: s.KV.kv, row0: C.int64_t(s.Row), n: C.int64_t(s.N), pos: C.int64_t(s.Pos)}
	}
	return result(C.mk_attention(p.p, pointer(q), C.mk_dtype(t), C.int(a.Heads), C.float(a.Scale), C.int64_t(a.Window),
		C.float(a.Softcap), (*C.float)(unsafe.Pointer(unsafe.SliceData(a.Sinks))), unsafe.SliceData(segs),
		C.int64_t(len(segs)), pointer(y)))
}

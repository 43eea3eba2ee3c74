package mlx

// #include "shim.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_kv_new
// #cgo nocallback mx_kv_new
// #cgo noescape mx_kv_truncate
// #cgo nocallback mx_kv_truncate
// #cgo noescape mx_kv_drop_before
// #cgo nocallback mx_kv_drop_before
// #cgo noescape mx_kv_share
// #cgo nocallback mx_kv_share
// #cgo noescape mx_kv_begin
// #cgo nocallback mx_kv_begin
// #cgo noescape mx_kv_read
// #cgo nocallback mx_kv_read
// #cgo noescape mx_kv_append
// #cgo nocallback mx_kv_append
import "C"

import (
	"fmt"
	"unsafe"
)

// KVCache holds one sequence's keys and values in one layer. Its length counts the rows of every Attention that was
// built on it, evaluated or not, so that building may run ahead of evaluation.
type KVCache struct {
	p      *C.mx_kv
	stream *Stream

	// Bytes of a position's keys and values.
	keys, values int
}

// NewKVCache makes an empty cache for kvHeads heads with keys of kDim and values of vDim elements of dtype (Float32,
// Float16 or BFloat16). Free releases it.
func (s *Stream) NewKVCache(kvHeads, kDim, vDim int, dtype Dtype) (*KVCache, error) {
	var failure C.mx_failure
	p := C.mx_kv_new(s.p, C.int(kvHeads), C.int(kDim), C.int(vDim), C.int(dtype), &failure)
	if p == nil {
		return nil, fmt.Errorf("mlx: new cache of %d heads, key %d, value %d, %s: %w", kvHeads, kDim, vDim, dtype, failed(&failure))
	}
	return &KVCache{p: p, stream: s, keys: kvHeads * kDim * dtype.Size(), values: kvHeads * vDim * dtype.Size()}, nil
}

// Len is the number of positions held or promised by operations already built: one past the last.
func (c *KVCache) Len() int { return int(C.mx_kv_len(c.p)) }

// First is the first position that DropBefore has left.
func (c *KVCache) First() int { return int(C.mx_kv_first(c.p)) }

// Bytes is the memory of the cache, what it shares with others in full.
func (c *KVCache) Bytes() uint64 { return uint64(C.mx_kv_bytes(c.p)) }

// Owed is what of Bytes the next rows will copy because others share it.
func (c *KVCache) Owed() uint64 { return uint64(C.mx_kv_owed(c.p)) }

// Truncate drops the positions from n on. Operations built on the cache must have been evaluated or given up
// together with their scope; after a failed step Truncate to the length before it makes the cache usable again. n is 0, or
// at least First.
func (c *KVCache) Truncate(n int) error {
	var failure C.mx_failure
	if !C.mx_kv_truncate(c.p, C.int64_t(n), &failure) {
		return fmt.Errorf("mlx: truncate cache to %d: %w", n, failed(&failure))
	}
	return nil
}

// DropBefore frees blocks that lie wholly before pos: a sliding window's past. Attention must not reach there any
// more.
func (c *KVCache) DropBefore(pos int) error {
	var failure C.mx_failure
	if !C.mx_kv_drop_before(c.p, C.int64_t(pos), &failure) {
		return fmt.Errorf("mlx: drop cache before %d: %w", pos, failed(&failure))
	}
	return nil
}

// Share makes a cache of the first keep positions that shares memory with c until one of them is written. keep is 0, or at
// least First.
func (c *KVCache) Share(keep int) (*KVCache, error) {
	var failure C.mx_failure
	p := C.mx_kv_share(c.p, C.int64_t(keep), &failure)
	if p == nil {
		return nil, fmt.Errorf("mlx: share %d positions of a cache: %w", keep, failed(&failure))
	}
	shared := *c
	shared.p = p
	return &shared, nil
}

// Begin lets an empty cache begin at position first, as if those before it had been dropped.
func (c *KVCache) Begin(first int) error {
	var failure C.mx_failure
	if !C.mx_kv_begin(c.p, C.int64_t(first), &failure) {
		return fmt.Errorf("mlx: begin cache at %d: %w", first, failed(&failure))
	}
	return nil
}

// RowBytes are the bytes of a position's keys and of its values, in the layout of Read: [heads, dim], row-major, little-endian
// and without padding. A latent cache's values take none.
func (c *KVCache) RowBytes() (keys, values int) { return c.keys, c.values }

// Read copies the keys and values of n positions from pos on, none of them dropped, position by position. Either may be nil.
func (c *KVCache) Read(pos, n int, keys, values []byte) error {
	var failure C.mx_failure
	if !C.mx_kv_read(c.p, C.int64_t(pos), C.int64_t(n), unsafe.Pointer(unsafe.SliceData(keys)), C.size_t(len(keys)),
		unsafe.Pointer(unsafe.SliceData(values)), C.size_t(len(values)), &failure) {
		return fmt.Errorf("mlx: read %d positions of a cache from %d: %w", n, pos, failed(&failure))
	}
	return nil
}

// Append adds n positions at the end, as Read gives them.
func (c *KVCache) Append(n int, keys, values []byte) error {
	var failure C.mx_failure
	if !C.mx_kv_append(c.p, C.int64_t(n), unsafe.Pointer(unsafe.SliceData(keys)), C.size_t(len(keys)),
		unsafe.Pointer(unsafe.SliceData(values)), C.size_t(len(values)), &failure) {
		return fmt.Errorf("mlx: append %d positions to a cache of %d: %w", n, c.Len(), failed(&failure))
	}
	return nil
}

// Free releases the cache once the work already handed to the stream is done with it. Twice is harmless.
func (c *KVCache) Free() {
	if c.p != nil {
		C.mx_kv_free(c.p)
		c.p = nil
	}
}

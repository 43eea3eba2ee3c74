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
// #cgo noescape mx_kv_fork
// #cgo nocallback mx_kv_fork
import "C"

import "fmt"

// KVCache holds one sequence's keys and values in one layer. Its length counts the rows of every Attention that was
// built on it, evaluated or not, so that building may run ahead of evaluation.
type KVCache struct {
	p      *C.mx_kv
	stream *Stream
}

// NewKVCache makes an empty cache for kvHeads heads with keys of kDim and values of vDim elements of dtype (Float32,
// Float16 or BFloat16). Free releases it.
func (s *Stream) NewKVCache(kvHeads, kDim, vDim int, dtype Dtype) (*KVCache, error) {
	var msg *C.char
	p := C.mx_kv_new(s.p, C.int(kvHeads), C.int(kDim), C.int(vDim), C.int(dtype), &msg)
	if p == nil {
		return nil, fmt.Errorf("mlx: new cache of %d heads, key %d, value %d, %s: %w", kvHeads, kDim, vDim, dtype, takeError(msg))
	}
	return &KVCache{p: p, stream: s}, nil
}

// Len is the number of positions held or promised by operations already built: one past the last.
func (c *KVCache) Len() int { return int(C.mx_kv_len(c.p)) }

// Bytes is the memory that the cache holds.
func (c *KVCache) Bytes() uint64 { return uint64(C.mx_kv_bytes(c.p)) }

// Truncate drops the positions from n on. Operations built on the cache must have been evaluated or given up
// together with their scope; after a failed step Truncate to the length before it makes the cache usable again.
func (c *KVCache) Truncate(n int) error {
	var msg *C.char
	if !C.mx_kv_truncate(c.p, C.int64_t(n), &msg) {
		return fmt.Errorf("mlx: truncate cache to %d: %w", n, takeError(msg))
	}
	return nil
}

// DropBefore frees blocks that lie wholly before pos: a sliding window's past. Attention must not reach there any
// more.
func (c *KVCache) DropBefore(pos int) error {
	var msg *C.char
	if !C.mx_kv_drop_before(c.p, C.int64_t(pos), &msg) {
		return fmt.Errorf("mlx: drop cache before %d: %w", pos, takeError(msg))
	}
	return nil
}

// Fork makes an independent copy that shares memory with c until one of them is written.
func (c *KVCache) Fork() (*KVCache, error) {
	var msg *C.char
	p := C.mx_kv_fork(c.p, &msg)
	if p == nil {
		return nil, fmt.Errorf("mlx: fork cache: %w", takeError(msg))
	}
	return &KVCache{p: p, stream: c.stream}, nil
}

// Free releases the cache once the work already handed to the stream is done with it. Twice is harmless.
func (c *KVCache) Free() {
	if c.p != nil {
		C.mx_kv_free(c.p)
		c.p = nil
	}
}

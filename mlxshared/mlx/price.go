package mlx

// #include "price.h"
import "C"

// kernelLanes is the elements up to which our CPU kernels round the rows of caches and states.
const kernelLanes = 16

// Backend is what BackendAuto takes on the device.
func (d Device) Backend() Backend {
	if d.Kind == DeviceCPU {
		return BackendKernels
	}
	return BackendMLX
}

// Backend is what runs the stream's heavy operations: BackendKernels or BackendMLX.
func (s *Stream) Backend() Backend {
	if s.atOnce {
		return BackendKernels
	}
	return BackendMLX
}

// CacheBlock is the number of positions by which the caches of the stream grow, and by whole multiples of which DropBefore
// frees them.
func (s *Stream) CacheBlock() int { return s.Backend().CacheBlock() }

// Block is the CacheBlock of the cache's stream.
func (c *KVCache) Block() int { return c.stream.CacheBlock() }

// CacheBlock is that of the back end's streams.
func (b Backend) CacheBlock() int { return int(C.mx_cache_block(C.bool(b == BackendKernels))) }

// RowBytes is the memory that a row of so many elements takes in the back end's caches and states.
func (b Backend) RowBytes(elements int, dtype Dtype) int64 {
	if b == BackendKernels {
		elements = (elements + kernelLanes - 1) / kernelLanes * kernelLanes
	}
	return int64(elements) * int64(dtype.Size())
}

// Invariant tells whether results do not depend, bit for bit, on what else is in a step, nor on how rows are cut into steps.
func (b Backend) Invariant() bool { return b == BackendKernels }

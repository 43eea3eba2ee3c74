package mlx

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// Backend names who runs the heavy operations.
type Backend string

const (
	// BackendAuto is BackendKernels on the CPU and BackendMLX on a GPU.
	BackendAuto Backend = ""
	// BackendKernels runs them on our CPU kernels: results do not depend on batch, chunk or thread count.
	BackendKernels Backend = "kernels"
	// BackendMLX runs them on MLX's own kernels.
	BackendMLX Backend = "mlx"
)

// Device kinds for Options.Device.
const (
	DeviceAuto = ""    // the GPU if there is one, else the CPU
	DeviceCPU  = "cpu" //
	DeviceGPU  = "gpu" // Metal or CUDA
)

// Options say where and how a stage computes.
type Options struct {
	Device  string  // DeviceAuto, DeviceCPU or DeviceGPU
	Backend Backend // BackendAuto except in tests
	Threads int     // of the CPU kernels, the evaluating one included; at least 1
	ISA     string  // of the CPU kernels: "" (best), "plain", "avx2", "avx512", "neon"
}

// ErrClosed reports the use of a closed stream, scope or cache.
var ErrClosed = errors.New("mlx: used after close")

// Stream is one stage's queue of work: an MLX stream and the threads of its kernels. One goroutine at a time uses a
// Stream and everything made from it.
type Stream struct {
	p      *C.mx_stream
	info   Device
	atOnce bool
}

// Open makes a stream. Close frees it.
func Open(o Options) (*Stream, error) {
	if o.Threads < 1 {
		return nil, fmt.Errorf("mlx: open: threads is %d, want at least 1", o.Threads)
	}
	var gpu C.bool
	switch o.Device {
	case DeviceAuto:
		gpu = C.mx_gpu_available()
	case DeviceCPU:
	case DeviceGPU:
		gpu = true
	default:
		return nil, fmt.Errorf("mlx: open: device %q, want \"cpu\" or \"gpu\"", o.Device)
	}
	var kernels C.bool
	switch o.Backend {
	case BackendAuto:
		kernels = !gpu
	case BackendKernels:
		kernels = true
	case BackendMLX:
	default:
		return nil, fmt.Errorf("mlx: open: backend %q, want %q or %q", o.Backend, BackendKernels, BackendMLX)
	}
	isa, ok := isas[o.ISA]
	if !ok {
		return nil, fmt.Errorf("mlx: open: instruction set %q, want plain, avx2, avx512 or neon", o.ISA)
	}
	var failure C.mx_failure
	p := C.mx_stream_open(gpu, kernels, C.int(o.Threads), isa, &failure)
	if p == nil {
		return nil, fmt.Errorf("mlx: open: %w", failed(&failure))
	}
	return &Stream{p: p, info: deviceInfo(bool(gpu)), atOnce: bool(kernels)}, nil
}

var isas = map[string]C.int{
	"": C.MX_ISA_AUTO, "plain": C.MX_ISA_PLAIN, "avx2": C.MX_ISA_AVX2, "avx512": C.MX_ISA_AVX512, "neon": C.MX_ISA_NEON,
}

// Close waits for running work and frees the stream and its threads. Scopes and caches must be closed before:
// Close reports those that are not and then leaves everything as it was.
func (s *Stream) Close() error {
	if s.p == nil {
		return nil
	}
	var failure C.mx_failure
	if !C.mx_stream_close(s.p, &failure) {
		return fmt.Errorf("mlx: close: %w", failed(&failure))
	}
	s.p = nil
	return nil
}

// Device describes what a stream runs on.
type Device struct {
	Kind        string // DeviceCPU or DeviceGPU
	Name        string // the maker's name
	TotalMemory uint64 // bytes
	FreeMemory  uint64 // bytes that can be allocated now
}

// DeviceInfo describes the stream's device, with the memory that is free now.
func (s *Stream) DeviceInfo() Device {
	s.info.FreeMemory = uint64(C.mx_device_free_memory(C.bool(s.info.Kind == DeviceGPU)))
	return s.info
}

// DeviceInfo describes the device that Open would take for kind ("", "cpu" or "gpu").
func DeviceInfo(kind string) (Device, error) {
	switch kind {
	case DeviceAuto:
		return deviceInfo(bool(C.mx_gpu_available())), nil
	case DeviceCPU:
		return deviceInfo(false), nil
	case DeviceGPU:
		if !C.mx_gpu_available() {
			return Device{}, errors.New("mlx: device \"gpu\": this build of MLX finds none")
		}
		return deviceInfo(true), nil
	}
	return Device{}, fmt.Errorf("mlx: device %q, want \"cpu\" or \"gpu\"", kind)
}

func deviceInfo(gpu bool) Device {
	d := Device{Kind: DeviceCPU}
	if gpu {
		d.Kind = DeviceGPU
	}
	name := C.mx_device_name(C.bool(gpu))
	defer C.free(unsafe.Pointer(name))
	d.Name = C.GoString(name)
	d.TotalMemory = uint64(C.mx_device_total_memory(C.bool(gpu)))
	d.FreeMemory = uint64(C.mx_device_free_memory(C.bool(gpu)))
	return d
}

// AtOnce is whether the heavy operations run when they are called, on BackendKernels. Else they queue up for Scope.Eval, which
// then should be called seldom.
func (s *Stream) AtOnce() bool { return s.atOnce }

// Version is MLX's.
func Version() string { return C.GoString(C.mx_version()) }

// MemoryInUse is the bytes held by arrays and caches now. MLX counts arrays for the whole process.
func (s *Stream) MemoryInUse() uint64 { return uint64(C.mx_memory_in_use(s.p)) }

// PeakMemory is the most bytes that arrays held since the last ResetPeakMemory, plus what caches hold now.
func (s *Stream) PeakMemory() uint64 { return uint64(C.mx_memory_peak(s.p)) }

// CachedMemory is the bytes that MLX keeps for reuse, of the whole process; MemoryInUse does not count them.
func (s *Stream) CachedMemory() uint64 { return uint64(C.mx_memory_cached()) }

// HeldMemory is the bytes of the stream's caches and states; what several share counts once.
func (s *Stream) HeldMemory() uint64 { return uint64(C.mx_stream_held(s.p)) }

// ScratchMemory is the bytes of working memory that the stream's kernels keep from one operation to the next.
func (s *Stream) ScratchMemory() uint64 { return uint64(C.mx_stream_scratch(s.p)) }

// ReleaseScratch frees that working memory. Nothing may be running on the stream.
func (s *Stream) ReleaseScratch() { C.mx_stream_release_scratch(s.p) }

// ResetPeakMemory starts PeakMemory anew.
func (s *Stream) ResetPeakMemory() { C.mx_memory_reset_peak() }

// ClearCache returns the memory that MLX keeps for reuse to the system.
func (s *Stream) ClearCache() { C.mx_memory_clear_cache() }

// Trim returns freed memory that the C library's heap keeps, of the whole process, to the system: whole pages, wherever they
// lie. Elsewhere than under glibc the heap does so by itself.
func (s *Stream) Trim() { C.mx_memory_trim() }

// SetMemoryLimit and SetCacheLimit bound what MLX allocates and what it keeps for reuse, in bytes, for the process.
func (s *Stream) SetMemoryLimit(bytes uint64) { C.mx_memory_set_limit(C.size_t(bytes)) }

// SetCacheLimit bounds what MLX keeps for reuse, in bytes, for the process.
func (s *Stream) SetCacheLimit(bytes uint64) { C.mx_memory_set_cache_limit(C.size_t(bytes)) }

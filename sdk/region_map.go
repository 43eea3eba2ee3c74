package sdk

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// Region is the shared memory between a host and one executor: a file without a name, mapped by both sides. The
// host's side makes it before the executor starts, and maps it when the layout is known, which is at Load.
type Region struct {
	mu     sync.Mutex
	file   *os.File
	layout RegionLayout
	mem    []byte
}

// NewRegion makes an empty region. No name of it is left in any file system.
func NewRegion() (*Region, error) {
	f, err := openAnonymous()
	if err != nil {
		return nil, fmt.Errorf("make a shared-memory region: %w", err)
	}
	return &Region{file: f}, nil
}

// File is what the executor inherits, see Inherit. It belongs to the region.
func (r *Region) File() *os.File { return r.file }

// Map lays the region out and maps it. Client.Load calls it. Mapping anew drops the slices that In and Out gave
// out; the file never shrinks, so that memory an executor still maps stays valid.
func (r *Region) Map(layout RegionLayout) error {
	if err := layout.Validate(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mem != nil && r.layout == layout {
		return nil
	}
	if err := r.unmap(); err != nil {
		return err
	}
	if err := growFile(r.file, layout.Size()); err != nil {
		return fmt.Errorf("size a shared-memory region to %d bytes: %w", layout.Size(), err)
	}
	return r.mapFile(layout)
}

// attach maps the region that the host sized, for the executor's side.
func (r *Region) attach(layout RegionLayout) error {
	if err := layout.Validate(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	info, err := r.file.Stat()
	if err != nil {
		return fmt.Errorf("read the size of the shared-memory region: %w", err)
	}
	if info.Size() < int64(layout.Size()) {
		return fmt.Errorf("shared-memory region has %d bytes, its layout of %d slots needs %d", info.Size(), layout.Slots, layout.Size())
	}
	if err := r.unmap(); err != nil {
		return err
	}
	return r.mapFile(layout)
}

func (r *Region) mapFile(layout RegionLayout) error {
	mem, err := mapShared(r.file, layout.Size())
	if err != nil {
		return fmt.Errorf("map a shared-memory region of %d bytes: %w", layout.Size(), err)
	}
	r.mem, r.layout = mem, layout
	return nil
}

// detach unmaps the region; the file stays open for another attach.
func (r *Region) detach() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unmap()
}

func (r *Region) unmap() error {
	mem := r.mem
	r.mem, r.layout = nil, RegionLayout{}
	if mem == nil {
		return nil
	}
	if err := unmapShared(mem); err != nil {
		return fmt.Errorf("unmap a shared-memory region: %w", err)
	}
	return nil
}

// Layout returns the layout that the region is mapped with, the zero value before Map.
func (r *Region) Layout() RegionLayout {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.layout
}

// In returns slot i's input area. It panics unless the region is mapped with more than i slots.
func (r *Region) In(i int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkSlot(i)
	return r.layout.In(r.mem, i)
}

// Out returns slot i's output area. It panics unless the region is mapped with more than i slots.
func (r *Region) Out(i int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkSlot(i)
	return r.layout.Out(r.mem, i)
}

// Masks returns slot i's mask area. It panics unless the region is mapped with more than i slots.
func (r *Region) Masks(i int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkSlot(i)
	return r.layout.Masks(r.mem, i)
}

func (r *Region) checkSlot(i int) {
	if i < 0 || i >= r.layout.Slots {
		panic(fmt.Sprintf("slot %d of a region with %d slots", i, r.layout.Slots))
	}
}

// Close unmaps the region and closes its file. No slice of it may be touched afterwards.
func (r *Region) Close() error {
	return errors.Join(r.detach(), r.file.Close())
}

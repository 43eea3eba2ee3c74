// Package weights owns a checkpoint's tensors: mapped files, quantization rules, shape checks, and the copy of what a
// stage asks for into MLX arrays.
package weights

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// Store is the weight files of a model folder. Headers are read at once; a file is mapped when its first tensor is
// read. It serves one goroutine.
type Store struct {
	checkpoint *safetensors.Checkpoint
	maps       map[string][]byte // by path
}

// Open reads the headers of every weight file of dir, with or without an index file. safetensors.ErrNoWeights, which
// may be wrapped, reports that there are none.
func Open(dir string) (*Store, error) {
	c, err := safetensors.Open(dir)
	if err != nil {
		return nil, typed(err)
	}
	return &Store{checkpoint: c, maps: map[string][]byte{}}, nil
}

// typed gives an error of the container its code, file and tensor.
func typed(err error) error {
	if errors.Is(err, safetensors.ErrNoWeights) {
		return err
	}
	out := &sdk.Error{Code: sdk.CodeCorrupt, Message: err.Error()}
	if e, ok := errors.AsType[*safetensors.FormatError](err); ok {
		out.File, out.Tensor = e.Path, e.Tensor
	} else if e, ok := errors.AsType[*safetensors.ShardError](err); ok {
		out.File = e.File
	} else {
		out.Code = sdk.CodeNotFound
	}
	return out
}

// Lookup returns the header of a tensor.
func (s *Store) Lookup(name string) (safetensors.Tensor, bool) { return s.checkpoint.Lookup(name) }

// Names returns every tensor's name in order.
func (s *Store) Names() []string { return s.checkpoint.Names() }

// read returns the bytes of a tensor. They stay valid until release or Close.
func (s *Store) read(t *safetensors.Tensor) ([]byte, error) {
	m, ok := s.maps[t.Path]
	if !ok {
		var err error
		if m, err = mapFile(t.Path); err != nil {
			return nil, &sdk.Error{Code: sdk.CodeNotFound, File: t.Path, Message: fmt.Sprintf("mapping %s: %v", t.Path, err)}
		}
		s.maps[t.Path] = m
	}
	if end := t.Offset + t.Size; end > int64(len(m)) {
		return nil, &sdk.Error{Code: sdk.CodeCorrupt, File: t.Path, Tensor: t.Name,
			Message: fmt.Sprintf("%s: tensor %s: truncated: its data ends at byte %d, the file at %d; fetch the file again", t.Path, t.Name, end, len(m))}
	}
	return m[t.Offset : t.Offset+t.Size], nil
}

// release gives the pages under a tensor that was copied back to the system, so that a load never holds the weights
// twice. Pages shared with a neighbour are read anew when needed.
func (s *Store) release(t *safetensors.Tensor) {
	page := int64(os.Getpagesize())
	from, to := t.Offset/page*page, t.Offset+t.Size
	if m := s.maps[t.Path]; from < to {
		_ = unix.Madvise(m[from:to], unix.MADV_DONTNEED) // advice: a refusal costs memory, not correctness
	}
}

// Close unmaps the files.
func (s *Store) Close() error {
	var errs []error
	for path, m := range s.maps {
		if len(m) > 0 {
			errs = append(errs, unix.Munmap(m))
		}
		delete(s.maps, path)
	}
	return errors.Join(errs...)
}

func mapFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() == 0 {
		return nil, nil
	}
	return unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
}

package nn

import (
	"fmt"
	"io"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// State is what one sequence keeps in one slot of a stage.
type State interface {
	// Len is the number of positions that went into the state.
	Len() int
	// Bytes held now, snapshots among them. What is shared with other states counts in full.
	Bytes() int64
	// Owed is what of Bytes the next rows will copy because another state, from which this one was shared, holds it too.
	Owed() int64
	// Settle is called after a step with the sequence's new length: what later rows can't see may go.
	Settle(length int) error
	// Nearest are the positions next to length, not after and not before it, that the state can go back to. They are length
	// itself where it can go there; 0 and Len are always among them.
	Nearest(length int) (before, after int)
	// Rewind drops every position at or past length, to which Nearest says the state can go back.
	Rewind(length int) error
	// Share makes a state of the first keep positions, to which Nearest says this one could go back. Memory is shared where
	// the state allows that; snapshots are not taken along.
	Share(keep int) (State, error)
	// Snapshot makes sure that the state can go back to its length later on. Of limit snapshots the oldest makes room.
	Snapshot(limit int) error
	// Section describes what Export writes.
	Section() Section
	// Export writes the state in the layout that Section describes; the state stays as it is.
	Export(w io.Writer) error
	// Import fills an empty state of length positions with what Export wrote. After an error the state is of no use.
	Import(s Section, length int, r io.Reader) error
	// Free releases the memory.
	Free()
}

// StateSpec makes states and prices them.
type StateSpec interface {
	// New makes the empty state of a sequence.
	New(s *mlx.Stream) (State, error)
	// Profile is what the state costs between steps on a back end. During a step a sliding window holds the step's rows as well.
	Profile(on mlx.Backend) sdk.StateProfile
}

// windowSlack is how many positions beyond its window a sliding layer keeps, so that what a stage ran past a stop
// string can be truncated.
const windowSlack = 64

// KVSpec is the keys and values of an attention layer.
type KVSpec struct {
	KVHeads          int
	KeyDim, ValueDim int
	Sliding          int  // positions that a row sees; 0 for all
	Latent           bool // one head, whose values are the first ValueDim elements of its keys and take no memory
	Dtype            mlx.Dtype
}

// New makes an empty cache.
func (k KVSpec) New(s *mlx.Stream) (State, error) {
	c, err := k.cache(s)
	if err != nil {
		return nil, err
	}
	return &kvState{spec: k, cache: c}, nil
}

func (k KVSpec) cache(s *mlx.Stream) (*mlx.KVCache, error) {
	if k.Latent {
		return s.NewLatentCache(k.KeyDim, k.ValueDim, k.Dtype)
	}
	return s.NewKVCache(k.KVHeads, k.KeyDim, k.ValueDim, k.Dtype)
}

// Profile prices keys and values, which grow by whole blocks.
func (k KVSpec) Profile(on mlx.Backend) sdk.StateProfile {
	p := sdk.StateProfile{Kind: sdk.StateKV, BytesPerPosition: on.RowBytes(k.KeyDim, k.Dtype), Block: on.CacheBlock()}
	if k.Latent {
		p.Kind = sdk.StateLatent
	} else {
		p.BytesPerPosition = int64(k.KVHeads) * (p.BytesPerPosition + on.RowBytes(k.ValueDim, k.Dtype))
	}
	p.Window = k.window(p.Block)
	return p
}

// window is the positions that a full sliding cache holds between steps at most, in whole blocks.
func (k KVSpec) window(block int) int {
	if k.Sliding == 0 {
		return 0
	}
	partial := block - 1 // at either end
	return (k.Sliding + windowSlack + 2*partial) / block * block
}

// firstKept is the first position still held after a step that ended at length.
func (k KVSpec) firstKept(length, block int) int {
	if k.Sliding == 0 {
		return 0
	}
	return max(0, length+1-k.Sliding-windowSlack) / block * block
}

type kvState struct {
	spec   KVSpec
	cache  *mlx.KVCache
	first  int  // positions before it are gone
	shared bool // made by Share: what both hold is the other's, until it is written
}

func (s *kvState) Len() int     { return s.cache.Len() }
func (s *kvState) Bytes() int64 { return int64(s.cache.Bytes()) }

func (s *kvState) Owed() int64 {
	if !s.shared {
		return 0
	}
	return int64(s.cache.Owed())
}

func (s *kvState) Settle(length int) error {
	keep := s.spec.firstKept(length, s.cache.Block())
	if keep <= s.first {
		return nil
	}
	s.first = keep
	return s.cache.DropBefore(keep)
}

// Nearest allows every length whose next row still sees its whole window.
func (s *kvState) Nearest(length int) (before, after int) {
	end, least := s.Len(), 0
	if s.first > 0 {
		least = min(end, s.first+s.spec.Sliding-1)
	}
	switch {
	case length <= 0:
		return 0, 0
	case length < least:
		return 0, least
	}
	return min(length, end), min(length, end)
}

func (s *kvState) Rewind(length int) error {
	if length == s.Len() {
		return nil
	}
	s.first = min(s.first, length)
	return s.cache.Truncate(length)
}

func (s *kvState) Share(keep int) (State, error) {
	c, err := s.cache.Share(keep)
	if err != nil {
		return nil, fmt.Errorf("sharing a cache: %w", err)
	}
	return &kvState{spec: s.spec, cache: c, first: min(s.first, keep), shared: true}, nil
}

// Snapshot has nothing to do: what is past the length can be dropped at any time.
func (s *kvState) Snapshot(int) error { return nil }

func (s *kvState) Free() { s.cache.Free() }

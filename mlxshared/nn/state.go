package nn

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// State is what one sequence keeps in one slot of a stage.
type State interface {
	// Bytes held now.
	Bytes() int64
	// Settle is called after a step with the sequence's new length: what later rows can't see may go.
	Settle(length int) error
	// CanTruncate refuses lengths that the state can't go back to.
	CanTruncate(length int) error
	// Truncate drops every position at or past length; CanTruncate has allowed it.
	Truncate(length int) error
	// Fork makes an independent copy.
	Fork() (State, error)
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
	spec  KVSpec
	cache *mlx.KVCache
	first int // positions before it are gone
}

func (s *kvState) Bytes() int64 { return int64(s.cache.Bytes()) }

func (s *kvState) Settle(length int) error {
	keep := s.spec.firstKept(length, s.cache.Block())
	if keep <= s.first {
		return nil
	}
	s.first = keep
	return s.cache.DropBefore(keep)
}

func (s *kvState) CanTruncate(length int) error {
	if needed := length + 1 - s.spec.Sliding; s.first > 0 && needed < s.first && length < s.cache.Len() {
		return sdk.Errorf(sdk.CodeUnsupported, "can't truncate a sliding window of %d to %d positions: those before %d are gone; release the sequence", s.spec.Sliding, length, s.first)
	}
	return nil
}

func (s *kvState) Truncate(length int) error { return s.cache.Truncate(length) }

func (s *kvState) Fork() (State, error) {
	c, err := s.cache.Fork()
	if err != nil {
		return nil, fmt.Errorf("forking a cache: %w", err)
	}
	return &kvState{spec: s.spec, cache: c, first: s.first}, nil
}

func (s *kvState) Free() { s.cache.Free() }

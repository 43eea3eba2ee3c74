package nn

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
)

// Builder is what modules are made with: the checkpoint's tensors, and the list of states that a sequence on this
// stage will need. A module adds its state and remembers the slot; a layer that shares another's state keeps that
// layer's slot instead.
type Builder struct {
	*weights.Loader
	Dtype  mlx.Dtype // of activations
	States []StateSpec

	shared map[string]int // slots by name
}

// AddState returns the slot of a new state.
func (b *Builder) AddState(s StateSpec) int {
	b.States = append(b.States, s)
	return len(b.States) - 1
}

// Share names a state so that later layers of the stage can read it.
func (b *Builder) Share(name string, slot int) {
	if b.shared == nil {
		b.shared = map[string]int{}
	}
	b.shared[name] = slot
}

// Shared returns the slot of the state of that name. The family's adjacency groups keep its owner on the same stage.
func (b *Builder) Shared(name string) int {
	slot, ok := b.shared[name]
	if !ok {
		panic("no layer before this one shares the state " + name)
	}
	return slot
}

// Quantizations are those that the modules of this package run, named as in sdk.Family. What comes in block-scaled float8 is
// widened.
func Quantizations() []string {
	return []string{"none", "affine-2", "affine-3", "affine-4", "affine-5", "affine-6", "affine-8", "mxfp4", "mxfp8", "nvfp4", "fp8"}
}

// Layer is one of a model's repeated blocks.
type Layer interface {
	// Forward maps the residual stream [rows, width] to the next layer's.
	Forward(p *Pass, x mlx.Array) mlx.Array
	// Kind names the layer for plans, e.g. "attention".
	Kind() string
}

// Head turns the last layer's residual stream into logits.
type Head interface {
	// Forward maps [rows, width] to float32 [rows, vocabulary].
	Forward(p *Pass, x mlx.Array) mlx.Array
}

// Embedder turns token ids into the residual stream.
type Embedder interface {
	// Forward maps int32 [rows] to [rows, width] in the activation dtype.
	Forward(p *Pass, ids mlx.Array) mlx.Array
}

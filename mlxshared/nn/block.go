package nn

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// Mixer is what mixes a sequence's positions in a block: attention or a recurrence.
type Mixer interface {
	// Forward maps [rows, width] to [rows, width] and extends the sequences' states.
	Forward(p *Pass, x mlx.Array) mlx.Array
	// Kind names the mixer for plans, e.g. "attention".
	Kind() string
}

// Block is a pre-norm transformer block: a mixer and a feed-forward layer, each behind a norm and within a residual
// connection.
type Block struct {
	InputNorm       *RMSNorm
	Mixer           Mixer
	FeedForwardNorm *RMSNorm
	FeedForward     FeedForward
}

// Kind is the mixer's, with "moe" where experts follow.
func (l *Block) Kind() string { return BlockKind(l.Mixer, l.FeedForward) }

// BlockKind is the kind of a block of these halves, whatever stands around them.
func BlockKind(m Mixer, f FeedForward) string {
	if _, dense := f.(*MLP); dense {
		return m.Kind()
	}
	return m.Kind() + "-moe"
}

// Forward maps the residual stream [rows, width] to the next layer's.
func (l *Block) Forward(p *Pass, x mlx.Array) mlx.Array {
	h, normed := l.FeedForwardNorm.AddForward(p, x, l.Mixer.Forward(p, l.InputNorm.Forward(p, x)))
	return p.Add(h, l.FeedForward.Forward(p, normed))
}

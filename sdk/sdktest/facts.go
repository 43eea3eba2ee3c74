package sdktest

import (
	"regexp"
	"slices"
	"strconv"

	"github.com/mlxcel/mlxcel/sdk"
)

// What the checks of states need to know of a model.

const (
	// block is what the checks take for the block of a model whose caches grow by less.
	block = 64
	// goBack is how many positions back a sequence can always go, whatever its windows have let go: the contract's number.
	goBack = 64
	// longest bounds the sequences of the checks.
	longest = 1100
)

// any tells whether a state of the model is one that is asked for.
func (m *model) any(is func(sdk.StateProfile) bool) bool {
	return slices.ContainsFunc(m.profile.Layers, func(l sdk.LayerProfile) bool { return slices.ContainsFunc(l.States, is) })
}

// recurrent tells whether a state of the model stands for all positions at once.
func (m *model) recurrent() bool {
	return m.any(func(s sdk.StateProfile) bool { return s.Fixed > 0 })
}

// grows tells whether a state of the model grows with every position.
func (m *model) grows() bool {
	return m.any(func(s sdk.StateProfile) bool { return s.BytesPerPosition > 0 && s.Window == 0 })
}

// fixedBytes is what one copy of all recurrent states takes.
func (m *model) fixedBytes() (n int64) {
	for _, l := range m.profile.Layers {
		n += l.StateBytes(0, 0)
	}
	return n
}

// window is the greatest number of positions after which a state of the model stops growing; 0 where none does.
func (m *model) window() (n int) {
	for _, l := range m.profile.Layers {
		for _, s := range l.States {
			n = max(n, s.Window)
		}
	}
	return n
}

// block is the greatest number of positions by which a state of the model grows.
func (m *model) block() int {
	n := block
	for _, l := range m.profile.Layers {
		for _, s := range l.States {
			n = max(n, s.Block)
		}
	}
	return n
}

// chunked tells whether the way a prompt is cut into steps changes no bit.
func (r *rig) chunked() bool { return r.device.Numerics.ChunkInvariant }

// ownPrompt is how many tokens a check puts behind what it keeps or goes back to.
const ownPrompt = 5

// lengths are those of the sequences that checks keep positions of and go back in: one that spans several blocks, and one
// whose windows have moved.
func (r *rig) lengths() []int {
	most := longest
	if limit := r.profile.ContextLength; limit > 0 {
		most = min(most, limit-ownPrompt-2*r.cfg.Generate-4)
	}
	list := []int{min(most, 2*r.block()+9)}
	if w := r.window(); w > 0 && w+goBack+9 <= most && w+goBack+9 > list[0] {
		list = append(list, w+goBack+9)
	}
	return list
}

// classes are the positions within a sequence that are worth a look.
func (r *rig) classes(length int) []int {
	block := r.block()
	list := []int{1, block / 2, block - 1, block, block + 1, length - goBack, length - 1, length}
	slices.Sort(list)
	return slices.DeleteFunc(slices.Compact(list), func(k int) bool { return k < 1 || k > length })
}

// mayLack tells whether a sequence of that length need not be able to go back to pos, of which it was told to keep a snapshot.
func (r *rig) mayLack(length, pos int) bool {
	return pos != length && (r.recurrent() && !r.has(sdk.CapabilitySnapshots) || r.window() > 0 && length-pos > goBack)
}

// snapshots is how many snapshots a check asks for, where the executor has any.
func (r *rig) snapshots(n int) int {
	if !r.has(sdk.CapabilitySnapshots) {
		return 0
	}
	return n
}

var number = regexp.MustCompile(`\d+`)

// numbers are those in a text.
func numbers(text string) (list []int) {
	for _, word := range number.FindAllString(text, -1) {
		if n, err := strconv.Atoi(word); err == nil {
			list = append(list, n)
		}
	}
	return list
}

package weights

import (
	"slices"
	"strconv"
	"strings"

	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// Names relates the tensor names that a family asks for, which are mlx-lm's, to those of other checkpoints.
type Names struct {
	Drop         []string // whole names that the family leaves aside though others write them
	DropContains []string // parts of such names
	Layers       Layers   // those past the model's end are left aside
	Sources      []Source // tried in order for names that the checkpoint lacks; they add up

	// Packed lists parts of the module paths that the config's default quantization speaks of where there is no checkpoint
	// to look at; empty means all.
	Packed []string
}

func (n *Names) drops(name string) bool {
	return n.Layers.past(name) || slices.Contains(n.Drop, name) || slices.ContainsFunc(n.DropContains, func(part string) bool { return strings.Contains(name, part) })
}

// Layers are numbered tensors, e.g. those that begin with "model.layers.". Layers past the last belong to something else,
// commonly the prediction of further tokens, and their numbers tell.
type Layers struct {
	Prefix string // empty: none are left aside
	Count  int
}

func (l *Layers) past(name string) bool {
	rest, ok := strings.CutPrefix(name, l.Prefix)
	if !ok || l.Prefix == "" {
		return false
	}
	number, _, _ := strings.Cut(rest, ".")
	i, err := strconv.Atoi(number)
	return err == nil && i >= l.Count
}

// packs reports whether the default quantization speaks of the module at path.
func (n *Names) packs(path string) bool {
	return len(n.Packed) == 0 || slices.ContainsFunc(n.Packed, func(part string) bool { return strings.Contains(path, part) })
}

// aliases are path and the other paths that a checkpoint may have for it.
func (n *Names) aliases(path string) []string {
	paths := []string{path}
	for i := range n.Sources {
		// Sources of tensors end in a dot or name the tensor itself.
		of, from := strings.TrimSuffix(n.Sources[i].Of, "."), strings.TrimSuffix(n.Sources[i].From, ".")
		if strings.Contains(path, of) {
			paths = append(paths, strings.Replace(path, of, from, 1))
		}
	}
	return paths
}

// Source says where a tensor lies in a checkpoint with other names or another layout.
type Source struct {
	Of   string // part of the name asked for
	From string // what the checkpoint has in its place; a "{}" counts experts from 0, each in a tensor of its own

	Transposed bool // the last two dimensions are swapped in the checkpoint
	Bytes      bool // the last two dimensions in the checkpoint are the bytes of one dimension of 32-bit words

	// Parts > 0: the tensor is one of that many equal parts of the checkpoint's along Axis, counted in the layout asked
	// for: the Part'th run of neighbours, or every Parts'th row from Part on.
	Parts, Part, Axis int
	Interleaved       bool
}

const expertMark = "{}"

// layout is how a tensor asked for is made of those in the checkpoint.
type layout struct {
	stacked           bool // one tensor per expert
	transposed        bool
	bytes             bool // of words
	parts, part, axis int  // parts 0: the whole
	interleaved       bool
}

func (l layout) with(s *Source) layout {
	l.stacked = l.stacked || strings.Contains(s.From, expertMark)
	l.transposed = l.transposed != s.Transposed
	l.bytes = l.bytes || s.Bytes
	if s.Parts > 0 {
		l.parts, l.part, l.axis, l.interleaved = s.Parts, s.Part, s.Axis, s.Interleaved
	}
	return l
}

// located is a tensor found in the checkpoint, under its own name or by sources.
type located struct {
	layout
	pattern string             // name in the checkpoint, with expertMark if stacked
	first   safetensors.Tensor // header: of expert 0 if stacked
	shape   []int64            // in the layout asked for; without the leading dimension if stacked
}

func (t *located) name(expert int) string {
	if !t.stacked {
		return t.pattern
	}
	return strings.Replace(t.pattern, expertMark, strconv.Itoa(expert), 1)
}

// locate finds the tensor that a family calls name.
func (s *Store) locate(name string, sources []Source) (*located, bool) {
	return s.locateAs(name, sources, layout{})
}

func (s *Store) locateAs(name string, sources []Source, l layout) (*located, bool) {
	t := &located{layout: l, pattern: name}
	var ok bool
	if t.first, ok = s.Lookup(t.name(0)); ok {
		if l.bytes {
			t.first = words(t.first)
		}
		t.shape = t.seen(t.first.Shape)
		return t, true
	}
	for i := range sources {
		source := &sources[i]
		if !strings.Contains(name, source.Of) {
			continue
		}
		other := strings.Replace(name, source.Of, source.From, 1)
		if t, ok := s.locateAs(other, sources[i+1:], l.with(source)); ok {
			return t, true
		}
	}
	return nil, false
}

// words views the header of bytes [..., n, m] as that of 32-bit words [..., n*m/4].
func words(t safetensors.Tensor) safetensors.Tensor {
	n := len(t.Shape)
	if t.Dtype != "U8" || n < 2 || t.Shape[n-2]*t.Shape[n-1]%4 != 0 {
		return t
	}
	t.Dtype = "U32"
	t.Shape = append(slices.Clone(t.Shape[:n-2]), t.Shape[n-2]*t.Shape[n-1]/4)
	return t
}

// seen is a checkpoint shape in the layout asked for.
func (l layout) seen(shape []int64) []int64 {
	shape = slices.Clone(shape)
	if n := len(shape); l.transposed && n >= 2 {
		shape[n-2], shape[n-1] = shape[n-1], shape[n-2]
	}
	if l.parts > 0 {
		if l.cutAxis() >= len(shape) || shape[l.cutAxis()]%int64(l.parts) != 0 {
			return nil
		}
		shape[l.cutAxis()] /= int64(l.parts)
	}
	return shape
}

// cutAxis is axis within one tensor of the checkpoint.
func (l layout) cutAxis() int {
	if l.stacked {
		return l.axis - 1
	}
	return l.axis
}

// arrange writes a checkpoint tensor of the given shape to dst in the layout asked for. item is the bytes of an element.
func (l layout) arrange(dst, src []byte, shape []int64, item int) {
	if !l.transposed && l.parts == 0 {
		copy(dst, src)
		return
	}
	strides := make([]int, len(shape)) // of src, by the dimensions asked for, in bytes
	stride := item
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = stride
		stride *= int(shape[i])
	}
	if n := len(strides); l.transposed {
		strides[n-2], strides[n-1] = strides[n-1], strides[n-2]
	}
	want := l.seen(shape)
	if l.parts > 0 {
		axis := l.cutAxis()
		if l.interleaved {
			src = src[l.part*strides[axis]:]
			strides[axis] *= l.parts
		} else {
			src = src[l.part*int(want[axis])*strides[axis]:]
		}
	}
	gather(dst, src, want, strides, item)
}

// gather copies the elements of a strided tensor to dst in row-major order and returns what is left of dst.
func gather(dst, src []byte, shape []int64, strides []int, item int) []byte {
	if len(shape) == 0 {
		return dst[copy(dst[:item], src):]
	}
	if len(shape) == 1 && strides[0] == item {
		n := int(shape[0]) * item
		return dst[copy(dst[:n], src):]
	}
	for i := range int(shape[0]) {
		dst = gather(dst, src[i*strides[0]:], shape[1:], strides[1:], item)
	}
	return dst
}

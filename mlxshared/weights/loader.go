package weights

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// Options configure a Loader.
type Options struct {
	Store *Store     // nil estimates sizes from the config alone
	Rules Rules      // of config.json
	Names Names      // of the family
	Plain mlx.Dtype  // of floating tensors where there is no Store
	Scope *mlx.Scope // nil plans: nothing is read, tensors are the zero Array
}

// Bounds of what a config may ask for: beyond them it is broken, and sums of bytes stay within int64.
const (
	maxDim      = 1 << 24
	maxElements = 1 << 56
	maxBytes    = 1 << 60
)

// Loader hands a model's tensors to its modules. It works in three ways that ask and check the same: it copies tensors
// into MLX arrays; it plans from the headers; or it plans from the config. Planning adds up bytes, so what Inspect
// tells is what a load will hold.
//
// The first failure sticks: later calls return zero values, and Err reports it, so that a family reads like a list of
// its modules. A matrix asked for twice is loaded and counted once.
type Loader struct {
	o        Options
	err      error
	bytes    int64
	counted  map[string]bool // names asked for
	used     map[string]bool // names in the checkpoint
	matrices map[string]*mlx.Matrix
	dtypes   map[string]mlx.Dtype   // of matrices' values, by path
	packed   map[Quantization]int64 // elements of the matrices so packed
	float8   bool                   // some tensors were stored as block-scaled float8
	arrays   []mlx.Array

	// Loaded, if set, is called after every tensor with its name and the bytes so far.
	Loaded func(tensor string, bytes int64)
	// Context, if set, ends the load when it is done.
	Context context.Context
}

// NewLoader makes a Loader.
func NewLoader(o Options) *Loader {
	return &Loader{o: o, counted: map[string]bool{}, used: map[string]bool{}, matrices: map[string]*mlx.Matrix{}, dtypes: map[string]mlx.Dtype{}, packed: map[Quantization]int64{}}
}

// Err is the first failure.
func (l *Loader) Err() error { return l.err }

// Bytes is the size of the tensors given out so far.
func (l *Loader) Bytes() int64 { return l.bytes }

// Tensors is the number of tensors given out so far.
func (l *Loader) Tensors() int { return len(l.counted) }

// Exact reports whether sizes come from the checkpoint and not from the config alone.
func (l *Loader) Exact() bool { return l.o.Store != nil }

// Planning reports that arrays are zero because nothing is read.
func (l *Loader) Planning() bool { return l.o.Scope == nil }

// Quantization lists the ways in which the matrices given out are packed, that of the most weights first; "none" if none is.
func (l *Loader) Quantization() string {
	if len(l.packed) == 0 {
		return "none"
	}
	var ways []string
	for _, q := range l.mostFirst() {
		ways = append(ways, q.String())
	}
	return strings.Join(ways, ", ")
}

// Packings names the same ways as sdk.Family.Quantizations does, and "fp8" where that was widened; "none" if there is neither.
func (l *Loader) Packings() []string {
	var names []string
	for _, q := range l.mostFirst() {
		names = append(names, q.name())
	}
	if l.float8 {
		names = append(names, "fp8")
	}
	if names == nil {
		return []string{"none"}
	}
	return slices.Compact(names)
}

func (l *Loader) mostFirst() []Quantization {
	return slices.SortedFunc(maps.Keys(l.packed), func(a, b Quantization) int {
		return cmp.Or(cmp.Compare(l.packed[b], l.packed[a]), strings.Compare(a.String(), b.String()))
	})
}

// Free releases every array given out. Nothing may use them any more.
func (l *Loader) Free() {
	for _, a := range l.arrays {
		a.Free()
	}
	l.arrays, l.matrices = nil, map[string]*mlx.Matrix{}
}

// Constant makes an array of values that a module computed from the config. It does not count as weights.
func (l *Loader) Constant(values []float32) mlx.Array {
	if l.err != nil || l.Planning() {
		return mlx.Array{}
	}
	return l.keep(l.o.Scope.FromFloat32s(values, len(values)))
}

// Vector returns the floating tensor of that name with n elements.
func (l *Loader) Vector(name string, n int) mlx.Array {
	return l.floating(name, n)
}

// Tensor returns the floating tensor of that name and shape.
func (l *Loader) Tensor(name string, shape ...int) mlx.Array {
	return l.floating(name, shape...)
}

// StoredFloat32 is Float32Tensor for values that conversions leave in float32, which counts where there is no checkpoint.
func (l *Loader) StoredFloat32(name string, shape ...int) mlx.Array {
	if l.o.Store == nil && l.err == nil {
		l.count(name, elements(shape)*int64(mlx.Float32.Size()))
		return mlx.Array{}
	}
	return l.Float32Tensor(name, shape...)
}

// Float32Tensor is Tensor in float32 whatever the checkpoint has.
func (l *Loader) Float32Tensor(name string, shape ...int) mlx.Array {
	a := l.floating(name, shape...)
	if a.IsZero() || a.Dtype() == mlx.Float32 {
		return a
	}
	wide := l.o.Scope.AsType(a, mlx.Float32)
	if err := l.o.Scope.Eval(wide); err != nil {
		l.fail(err)
		return mlx.Array{}
	}
	return l.keep(wide)
}

// Matrix returns the weight of the module at path: rows output features by cols input features, packed or plain as
// the checkpoint has it.
func (l *Loader) Matrix(path string, rows, cols int) *mlx.Matrix { return l.matrix(path, rows, cols) }

// DenseMatrix is Matrix for a weight that no conversion packs.
func (l *Loader) DenseMatrix(path string, rows, cols int) *mlx.Matrix {
	return &mlx.Matrix{Format: mlx.Dense, W: l.floating(path+".weight", rows, cols)}
}

// Experts returns the weights of the module at path, one matrix of rows by cols per expert.
func (l *Loader) Experts(path string, experts, rows, cols int) *mlx.Experts {
	m := l.matrix(path, experts, rows, cols)
	if m == nil {
		return nil
	}
	return &mlx.Experts{Matrix: *m}
}

// matrix returns a weight of shape [..., rows, cols].
func (l *Loader) matrix(path string, shape ...int) *mlx.Matrix {
	if m, ok := l.matrices[path]; ok || l.err != nil {
		return m
	}
	if !l.believes(path, shape) {
		return nil
	}
	var m *mlx.Matrix
	if l.o.Store == nil {
		m = l.estimateMatrix(path, shape)
	} else if q := l.quantization(path, shape); q != nil {
		m = l.packedMatrix(path, shape, *q)
	} else {
		m = &mlx.Matrix{Format: mlx.Dense, W: l.floating(path+".weight", shape...)}
		l.dtypes[path] = l.headerDtype(path + ".weight")
	}
	if l.err != nil {
		return nil
	}
	l.matrices[path] = m
	return m
}

// MatrixDtype is the floating type of a matrix's values: of its scales if it is packed. The microscaling formats have
// no such type and count as bfloat16, as in MLX. The matrix must have been given out.
func (l *Loader) MatrixDtype(path string) mlx.Dtype { return l.dtypes[path] }

// quantization says how the module at path is packed, nil if it is not.
func (l *Loader) quantization(path string, shape []int) *Quantization {
	override, named := l.o.Rules.override(&l.o.Names, path)
	scales, packed := l.locate(path + ".scales")
	switch {
	case named:
		return override
	case !packed:
		return nil
	}
	q, err := l.infer(path, shape, scales)
	if err != nil {
		l.fail(err)
	}
	return q
}

func (l *Loader) locate(name string) (*located, bool) {
	return l.o.Store.locate(name, l.o.Names.Sources)
}

// infer finds bits and group from the shapes, and the format from the scales' type, as mlx_lm's infer_quant_config.
func (l *Loader) infer(path string, shape []int, scales *located) (*Quantization, error) {
	weight, ok := l.locate(path + ".weight")
	if !ok {
		return nil, l.missing(path + ".weight")
	}
	rows, cols := shape[len(shape)-2], shape[len(shape)-1]
	for _, t := range []*located{weight, scales} {
		n := len(t.shape)
		if n < 2 || t.shape[n-2] != int64(rows) || t.shape[n-1] < 1 {
			return nil, corrupt(&t.first, "has shape %v, %s asks for %d packed rows", t.first.Shape, config.FileName, rows)
		}
	}
	words, groups := int(last(weight.shape)), int(last(scales.shape))
	q := Quantization{Format: mlx.Affine, Bits: words * 32 / cols, Group: cols / groups}
	if scales.first.Dtype == "U8" {
		for _, m := range modes {
			if m.Format != mlx.Affine && m.Bits == q.Bits && m.Group == q.Group {
				return &m, nil
			}
		}
		return nil, corrupt(&scales.first, "8-bit scales with %d bits and groups of %d fit no format", q.Bits, q.Group)
	}
	if !slices.Contains(affineBits, q.Bits) {
		return nil, corrupt(&weight.first, "has shape %v, which packs %d input features in %d bits; MLX packs %v", weight.first.Shape, cols, q.Bits, affineBits)
	}
	if !slices.Contains(affineGroups, q.Group) {
		return nil, corrupt(&scales.first, "has shape %v, which groups %d input features by %d; MLX groups by %v", scales.first.Shape, cols, q.Group, affineGroups)
	}
	return &q, nil
}

func (l *Loader) packedMatrix(path string, shape []int, q Quantization) *mlx.Matrix {
	cols := last(shape)
	if cols%q.Group != 0 || cols*q.Bits%32 != 0 {
		l.fail(&sdk.Error{Code: sdk.CodeCorrupt, Tensor: path + ".weight", Message: fmt.Sprintf(
			"%s: %d input features do not divide into %s; compare quantization and sizes in %s", path, cols, q, config.FileName)})
		return nil
	}
	m := &mlx.Matrix{Format: q.Format, Bits: q.Bits, Group: q.Group}
	m.W = l.tensor(path+".weight", []string{"U32"}, withLast(shape, cols*q.Bits/32)...)
	groups := withLast(shape, cols/q.Group)
	if q.Format == mlx.Affine {
		m.Scales = l.floating(path+".scales", groups...)
		m.Biases = l.floating(path+".biases", groups...)
		l.dtypes[path] = l.headerDtype(path + ".scales")
	} else {
		m.Scales = l.tensor(path+".scales", []string{"U8"}, groups...)
		l.dtypes[path] = mlx.BFloat16
	}
	l.packed[q] += elements(shape)
	return m
}

func last[T any](s []T) T { return s[len(s)-1] }

// withLast is shape with another last dimension.
func withLast(shape []int, n int) []int {
	return append(slices.Clone(shape[:len(shape)-1]), n)
}

// estimateMatrix counts what mlx_lm.convert would write.
func (l *Loader) estimateMatrix(path string, shape []int) *mlx.Matrix {
	l.dtypes[path] = l.o.Plain
	elements, item := elements(shape), int64(l.o.Plain.Size())
	q := l.o.Rules.estimate(&l.o.Names, path, last(shape))
	if q == nil {
		l.count(path+".weight", elements*item)
		return &mlx.Matrix{}
	}
	l.count(path+".weight", elements*int64(q.Bits)/8)
	groups := elements / int64(q.Group)
	if q.Format == mlx.Affine {
		l.count(path+".scales", groups*item)
		l.count(path+".biases", groups*item)
	} else {
		l.count(path+".scales", groups)
		l.dtypes[path] = mlx.BFloat16
	}
	l.packed[*q] += elements
	return &mlx.Matrix{}
}

// dtypes of safetensors and what they become; all but float8 are copied as they are.
var arrayDtypes = map[string]mlx.Dtype{
	"F32": mlx.Float32, "F16": mlx.Float16, "BF16": mlx.BFloat16, "U32": mlx.Uint32, "U8": mlx.Uint8,
	fp8: mlx.BFloat16,
}

var floatingDtypes = []string{"F32", "F16", "BF16", fp8}

func (l *Loader) floating(name string, shape ...int) mlx.Array {
	return l.tensor(name, floatingDtypes, shape...)
}

// tensor gives out one tensor after checking its type and shape.
func (l *Loader) tensor(name string, dtypes []string, shape ...int) mlx.Array {
	if l.err == nil && l.Context != nil && l.Context.Err() != nil {
		l.fail(sdk.Errorf(sdk.CodeCanceled, "loading was canceled at tensor %s", name))
	}
	if l.err != nil || !l.believes(name, shape) {
		return mlx.Array{}
	}
	if l.o.Store == nil {
		l.count(name, elements(shape)*int64(l.o.Plain.Size()))
		return mlx.Array{}
	}
	t, ok := l.locate(name)
	if !ok {
		l.fail(l.missing(name))
		return mlx.Array{}
	}
	if !slices.Contains(dtypes, t.first.Dtype) {
		l.fail(corrupt(&t.first, "is %s, want %s", t.first.Dtype, strings.Join(dtypes, " or ")))
		return mlx.Array{}
	}
	parts, err := l.parts(t, shape)
	if err != nil {
		l.fail(err)
		return mlx.Array{}
	}
	a := l.copy(t, parts, shape)
	if l.err == nil {
		l.count(name, elements(shape)*int64(arrayDtypes[t.first.Dtype].Size()))
	}
	return a
}

// parts returns the headers of the checkpoint's tensors that make up t, which must have the given shape, and marks them
// as used.
func (l *Loader) parts(t *located, shape []int) ([]safetensors.Tensor, error) {
	want, n := shape, 1
	if t.stacked {
		want, n = shape[1:], shape[0]
	}
	parts := make([]safetensors.Tensor, n)
	for i := range parts {
		name := t.name(i)
		part, ok := l.o.Store.Lookup(name)
		if !ok {
			return nil, l.missing(name)
		}
		if t.bytes {
			part = words(part)
		}
		if part.Dtype != t.first.Dtype {
			return nil, corrupt(&part, "is %s, expert 0 has %s", part.Dtype, t.first.Dtype)
		}
		if !sameShape(t.seen(part.Shape), want) {
			return nil, corrupt(&part, "has shape %v, %s asks for %v", part.Shape, config.FileName, want)
		}
		l.used[name] = true
		if part.Dtype == fp8 {
			if _, err := l.blockScales(&part); err != nil {
				return nil, err
			}
			l.float8 = true
		}
		parts[i] = part
	}
	return parts, nil
}

func (l *Loader) count(name string, bytes int64) {
	if l.counted[name] {
		return
	}
	l.counted[name] = true
	if l.bytes += bytes; l.bytes > maxBytes {
		l.fail(sdk.Errorf(sdk.CodeInvalid, "sizes in %s ask for more than %d bytes of weights", config.FileName, int64(maxBytes)))
	}
	if l.Loaded != nil {
		l.Loaded(name, l.bytes)
	}
}

// copy reads the parts of a tensor from the map into one array.
func (l *Loader) copy(t *located, parts []safetensors.Tensor, shape []int) mlx.Array {
	if l.Planning() {
		return mlx.Array{}
	}
	dtype := arrayDtypes[t.first.Dtype]
	a, to := l.o.Scope.Uninitialized(dtype, shape...)
	for i := range parts {
		data, err := l.o.Store.read(&parts[i])
		if err != nil {
			l.fail(err)
			return mlx.Array{}
		}
		if parts[i].Dtype == fp8 {
			if data, err = l.widen(&parts[i], data); err != nil {
				l.fail(err)
				return mlx.Array{}
			}
		}
		if l.o.Scope.Err() == nil {
			n := len(to) / (len(parts) - i)
			t.arrange(to[:n], data, parts[i].Shape, dtype.Size())
			to = to[n:]
		}
		l.o.Store.release(&parts[i])
	}
	return l.keep(a)
}

func (l *Loader) keep(a mlx.Array) mlx.Array {
	if err := l.o.Scope.Err(); err != nil {
		l.fail(err)
		return mlx.Array{}
	}
	l.arrays = append(l.arrays, l.o.Scope.Keep(a))
	return a
}

func (l *Loader) headerDtype(name string) mlx.Dtype {
	t, ok := l.locate(name)
	if !ok {
		return mlx.Bool // the tensor was refused already
	}
	return arrayDtypes[t.first.Dtype]
}

// CheckUnused refuses tensors that no module asked for and names does not drop: a checkpoint with more in it than the
// family computes would answer wrongly. It is called after a whole model was planned.
func (l *Loader) CheckUnused(names *Names) error {
	if l.err != nil || l.o.Store == nil {
		return l.err
	}
	for _, name := range l.o.Store.Names() {
		if l.used[name] || names.drops(name) {
			continue
		}
		t, _ := l.o.Store.Lookup(name)
		return &sdk.Error{Code: sdk.CodeUnsupported, File: t.Path, Tensor: name, Message: fmt.Sprintf(
			"%s: tensor %s has no place in the model that %s describes: wrong model_type, layer count or bias setting, or a family that is not built", t.Path, name, config.FileName)}
	}
	return nil
}

func (l *Loader) missing(name string) error {
	dir := l.o.Store.checkpoint.Dir
	return &sdk.Error{Code: sdk.CodeNotFound, File: dir, Tensor: name, Message: fmt.Sprintf(
		"%s: no tensor %s, which %s asks for; fetch the model again", filepath.Clean(dir), name, config.FileName)}
}

func corrupt(t *safetensors.Tensor, format string, args ...any) error {
	return &sdk.Error{Code: sdk.CodeCorrupt, File: t.Path, Tensor: t.Name,
		Message: fmt.Sprintf("%s: tensor %s: %s", t.Path, t.Name, fmt.Sprintf(format, args...))}
}

func (l *Loader) fail(err error) {
	if l.err == nil {
		l.err = err
	}
}

func sameShape(got []int64, want []int) bool {
	return slices.EqualFunc(got, want, func(a int64, b int) bool { return a == int64(b) })
}

// believes refuses shapes that only a broken config asks for.
func (l *Loader) believes(name string, shape []int) bool {
	n := int64(1)
	for _, d := range shape {
		if d < 1 || d > maxDim || n > maxElements/int64(d) {
			l.fail(sdk.Errorf(sdk.CodeInvalid, "%s: sizes in %s ask for a tensor of %v; dimensions up to %d are believed, and %d elements", name, config.FileName, shape, maxDim, int64(maxElements)))
			return false
		}
		n *= int64(d)
	}
	return true
}

func elements(shape []int) int64 {
	n := int64(1)
	for _, d := range shape {
		n *= int64(d)
	}
	return n
}

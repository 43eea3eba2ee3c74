package weights

import (
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// Quantization is how one matrix is packed.
type Quantization struct {
	Format mlx.Format // not mlx.Dense
	Bits   int
	Group  int // neighbouring input features that share a scale
}

// String is e.g. "affine 4-bit group 64" or "mxfp4 group 32".
func (q Quantization) String() string {
	if q.Format == mlx.Affine {
		return fmt.Sprintf("affine %d-bit group %d", q.Bits, q.Group)
	}
	return fmt.Sprintf("%s group %d", q.Format, q.Group)
}

// name is as in sdk.Family.Quantizations: "affine-4", "mxfp4".
func (q Quantization) name() string {
	if q.Format == mlx.Affine {
		return fmt.Sprintf("affine-%d", q.Bits)
	}
	return q.Format.String()
}

// modes maps the values of config.json's quantization mode to formats; only affine leaves bits and group open.
var modes = map[string]Quantization{
	"affine": {mlx.Affine, 4, 64},
	"mxfp4":  {mlx.MXFP4, 4, 32},
	"mxfp8":  {mlx.MXFP8, 8, 32},
	"nvfp4":  {mlx.NVFP4, 4, 16},
}

// What MLX packs as affine.
var (
	affineBits   = []int{2, 3, 4, 5, 6, 8}
	affineGroups = []int{32, 64, 128}
)

// Rules are config.json's word on quantization, read as mlx-lm reads it (mlx_lm/utils.py, load_model): an entry under a
// module's path decides for that module; any other module is quantized exactly if the checkpoint holds its scales, and
// how is inferred from their shape. The default counts only where there is no checkpoint to look at.
type Rules struct {
	Default   *Quantization            // nil: the config says nothing
	Overrides map[string]*Quantization // by module path; nil means not quantized
}

// ReadRules reads "quantization", or "quantization_config" in its place. Faults are recorded in o.
func ReadRules(o *config.Object) Rules {
	key := "quantization"
	q := o.Object(key)
	if q == nil {
		key = "quantization_config"
		if q = o.Object(key); q == nil {
			return Rules{}
		}
		switch method := q.StringOr("quant_method", ""); method {
		case "", "affine":
		case "mxfp4", "mxfp8":
			d := modes[method]
			return Rules{Default: &d}
		case "fp8":
			checkFP8(q)
			return Rules{}
		default:
			q.Unsupported("quant_method", "%q is not built; convert the model with mlx_lm.convert", method)
			return Rules{}
		}
	}
	r := Rules{Default: readQuantization(q), Overrides: map[string]*Quantization{}}
	for _, path := range q.Keys() {
		switch v := q.Value(path).(type) {
		case map[string]any:
			r.Overrides[path] = readQuantization(q.Object(path))
		case bool:
			if !v {
				r.Overrides[path] = nil
			}
		}
	}
	return r
}

// readQuantization reads one entry: an entry without mode is affine, whatever the default's mode is.
func readQuantization(o *config.Object) *Quantization {
	mode := o.StringOr("mode", "affine")
	q, ok := modes[mode]
	if !ok {
		o.Unsupported("mode", "%q is not built; built are affine, mxfp4, mxfp8, nvfp4", mode)
		return nil
	}
	bits, group := o.SizeOr("bits", q.Bits), o.SizeOr("group_size", q.Group)
	switch {
	case q.Format != mlx.Affine && (bits != q.Bits || group != q.Group):
		o.Fail("mode", "%s has %d bits and groups of %d, not %d and %d", mode, q.Bits, q.Group, bits, group)
	case q.Format == mlx.Affine && !slices.Contains(affineBits, bits):
		o.Unsupported("bits", "%d is not built; built are %v", bits, affineBits)
	case q.Format == mlx.Affine && !slices.Contains(affineGroups, group):
		o.Unsupported("group_size", "%d is not built; built are %v", group, affineGroups)
	}
	return &Quantization{q.Format, bits, group}
}

// estimate says how a matrix of cols input features would be packed by mlx_lm.convert: those whose last dimension does
// not divide by the group stay as they are. An entry for one of the module's names decides; else the default does, if it
// speaks of the module.
func (r *Rules) estimate(n *Names, path string, cols int) *Quantization {
	q, named := r.override(n, path)
	if !named && n.packs(path) {
		q = r.Default
	}
	if q == nil || cols%q.Group != 0 {
		return nil
	}
	return q
}

// override is the entry for the module at path under any of its names.
func (r *Rules) override(n *Names, path string) (q *Quantization, named bool) {
	for _, p := range n.aliases(path) {
		if q, named = r.Overrides[p]; named {
			return q, true
		}
	}
	return nil, false
}

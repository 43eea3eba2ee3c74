package sdk

import "fmt"

// Dtype is the element type of a tensor that crosses the contract.
type Dtype int

const (
	DtypeAuto     Dtype = iota // the checkpoint's own, in requests only
	DtypeFloat32               // 4 bytes, little-endian
	DtypeFloat16               // 2 bytes, IEEE 754 binary16
	DtypeBFloat16              // 2 bytes, the upper half of a float32
	DtypeInt32                 // 4 bytes
)

// Size returns the bytes of one element; 0 for DtypeAuto.
func (d Dtype) Size() int {
	switch d {
	case DtypeFloat32, DtypeInt32:
		return 4
	case DtypeFloat16, DtypeBFloat16:
		return 2
	}
	return 0
}

// String returns the name that flags and configs use, e.g. "bfloat16".
func (d Dtype) String() string {
	switch d {
	case DtypeAuto:
		return "auto"
	case DtypeFloat32:
		return "float32"
	case DtypeFloat16:
		return "float16"
	case DtypeBFloat16:
		return "bfloat16"
	case DtypeInt32:
		return "int32"
	}
	return fmt.Sprintf("dtype(%d)", int(d))
}

// ParseActivationDtype reads the value of --dtype: auto, float32, bfloat16 or float16.
func ParseActivationDtype(s string) (Dtype, error) {
	for _, d := range []Dtype{DtypeAuto, DtypeFloat32, DtypeBFloat16, DtypeFloat16} {
		if s == d.String() {
			return d, nil
		}
	}
	return 0, fmt.Errorf("unknown dtype %q: use --dtype auto, float32, bfloat16 or float16", s)
}

package sdk

import (
	"fmt"
	"math"
	"math/bits"
	"reflect"
	"strings"
)

// StateProfile is what one state of a layer costs each sequence. It grows by whole blocks up to its window.
type StateProfile struct {
	Kind             StateKind
	BytesPerPosition int64 // 0 for a state that does not grow
	Window           int   // positions after which it stops growing; 0 means never
	Fixed            int64 // bytes at any length
	Block            int   // positions by which it grows, as the executor's back end allocates; 0 and 1 mean one by one
}

// Bytes returns what the state of a sequence of so many positions takes between steps: exactly before its window is full,
// at most from then on. What does not fit an int64 is math.MaxInt64.
func (s StateProfile) Bytes(positions int) int64 {
	block, held := int64(max(1, s.Block)), int64(max(0, positions))
	if rest := held % block; rest > 0 {
		held = saturatedSum(held, block-rest)
	}
	if s.Window > 0 {
		held = min(held, int64(s.Window))
	}
	return saturatedSum(s.Fixed, saturatedProduct(s.BytesPerPosition, held))
}

// StateBytes returns what all the layer's states of a sequence of so many positions take, with so many snapshots of those
// that do not grow.
func (l LayerProfile) StateBytes(positions, snapshots int) int64 {
	var n int64
	for _, s := range l.States {
		n = saturatedSum(n, saturatedSum(s.Bytes(positions), saturatedProduct(s.Fixed, int64(max(0, snapshots)))))
	}
	return n
}

// PositionBytes returns what one more position adds, block by block, while no window is full.
func (l LayerProfile) PositionBytes() int64 {
	var n int64
	for _, s := range l.States {
		n = saturatedSum(n, s.BytesPerPosition)
	}
	return n
}

func saturatedSum(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

func saturatedProduct(a, b int64) int64 {
	high, low := bits.Mul64(uint64(a), uint64(b))
	if high != 0 || low > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(low)
}

// ProfileDifference is one value in which two profiles of a model differ.
type ProfileDifference struct {
	Field     string // e.g. "Boundary.Width" or "Layers[3].States[0].Block"
	Want, Got string
}

func (d ProfileDifference) String() string {
	return fmt.Sprintf("%s %s, want %s", d.Field, d.Got, d.Want)
}

// maxDifferences bounds what Diff names: one cause differs in every layer.
const maxDifferences = 3

// Diff returns the first values in which got differs from p, three at most; none where they are equal.
func (p *ModelProfile) Diff(got *ModelProfile) []ProfileDifference {
	var d differ
	d.compare("", reflect.ValueOf(p).Elem(), reflect.ValueOf(got).Elem())
	return d.found
}

type differ struct{ found []ProfileDifference }

func (d *differ) compare(field string, want, got reflect.Value) {
	if len(d.found) == maxDifferences {
		return
	}
	switch want.Kind() {
	case reflect.Struct:
		for i := range want.NumField() {
			d.compare(strings.TrimPrefix(field+"."+want.Type().Field(i).Name, "."), want.Field(i), got.Field(i))
		}
	case reflect.Slice:
		if want.Len() != got.Len() {
			d.add("number of "+field, want.Len(), got.Len())
			return
		}
		for i := range want.Len() {
			d.compare(fmt.Sprintf("%s[%d]", field, i), want.Index(i), got.Index(i))
		}
	default:
		if w, g := want.Interface(), got.Interface(); w != g {
			d.add(field, w, g)
		}
	}
}

func (d *differ) add(field string, want, got any) {
	show := func(v any) string {
		if text, ok := v.(string); ok {
			return fmt.Sprintf("%q", text)
		}
		return fmt.Sprint(v)
	}
	d.found = append(d.found, ProfileDifference{field, show(want), show(got)})
}

// Package filltest owns values in which every field is set, for tests that send them somewhere: a field that is forgotten on
// the way arrives as zero and shows.
package filltest

import (
	"fmt"
	"reflect"
	"unsafe"
)

// Of returns a T with every field set, deeply and however hidden, each to a value of its own. A field of an interface type
// gets the first of with that it can hold. A field that nothing is known for panics.
func Of[T any](with ...any) T {
	var v T
	f := filler{with: with}
	f.fill(reflect.ValueOf(&v).Elem())
	return v
}

type filler struct {
	with []any
	next int
}

func (f *filler) fill(v reflect.Value) {
	f.next++
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprint("text ", f.next))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(int64(f.next))
	case reflect.Uint, reflect.Uint64, reflect.Uint32, reflect.Uint16:
		v.SetUint(uint64(f.next))
	case reflect.Uint8:
		v.SetUint(uint64(1 + f.next%255))
	case reflect.Float64, reflect.Float32:
		v.SetFloat(float64(f.next) / 256)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		f.items(v)
	case reflect.Array:
		f.items(v)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 2 {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			f.fill(key)
			f.fill(value)
			v.SetMapIndex(key, value)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			field := v.Field(i)
			f.fill(reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem()) // hidden ones too
		}
	default:
		v.Set(f.given(v.Type()))
	}
}

func (f *filler) items(v reflect.Value) {
	for i := range v.Len() {
		f.fill(v.Index(i))
	}
}

func (f *filler) given(t reflect.Type) reflect.Value {
	for _, w := range f.with {
		if v := reflect.ValueOf(w); v.Type().AssignableTo(t) {
			return v
		}
	}
	panic(fmt.Sprintf("no value for a field of type %v", t))
}

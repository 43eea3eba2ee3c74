// Package filltest owns values in which every field is set, for tests that send them somewhere: a field that is forgotten on
// the way arrives as zero and shows.
package filltest

import (
	"fmt"
	"reflect"
	"unsafe"
)

// Of returns a T with every field set, deeply and however hidden, each to a value of its own. A field of a type
// that with has a value of gets that value, as one of an enumeration must; so does one of an interface type that can hold it. A
// field that nothing is known for panics.
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
	if given, ok := f.given(v.Type()); ok {
		v.Set(given)
		return
	}
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
		panic(fmt.Sprintf("no value for a field of type %v", v.Type()))
	}
}

func (f *filler) items(v reflect.Value) {
	for i := range v.Len() {
		f.fill(v.Index(i))
	}
}

func (f *filler) given(t reflect.Type) (v reflect.Value, ok bool) {
	for _, w := range f.with {
		v := reflect.ValueOf(w)
		if v.Type() == t || t.Kind() == reflect.Interface && v.Type().AssignableTo(t) {
			return v, true
		}
	}
	return v, false
}

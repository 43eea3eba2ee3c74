// Package gguftest writes small GGUF files for tests.
package gguftest

import "encoding/binary"

const align = 32

// Builder collects metadata and tensors; Bytes gives the file. Kinds and types are numbered as the format numbers them.
type Builder struct {
	keys, tensors     int
	meta, table, data []byte
}

// U32 encodes v.
func U32(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }

// U64 encodes v.
func U64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

// Str encodes a string value.
func Str(s string) []byte { return append(U64(uint64(len(s))), s...) }

// Key adds a metadata key with an encoded value of the given kind.
func (b *Builder) Key(name string, kind uint32, value []byte) {
	b.keys++
	b.meta = append(b.meta, Str(name)...)
	b.meta = append(b.meta, U32(kind)...)
	b.meta = append(b.meta, value...)
}

// String adds a string key.
func (b *Builder) String(name, value string) { b.Key(name, 8, Str(value)) }

// Uint adds a uint32 key.
func (b *Builder) Uint(name string, value uint32) { b.Key(name, 4, U32(value)) }

// Bool adds a boolean key.
func (b *Builder) Bool(name string, value bool) {
	v := byte(0)
	if value {
		v = 1
	}
	b.Key(name, 7, []byte{v})
}

// Strings adds an array of strings.
func (b *Builder) Strings(name string, values ...string) {
	v := append(U32(8), U64(uint64(len(values)))...)
	for _, s := range values {
		v = append(v, Str(s)...)
	}
	b.Key(name, 9, v)
}

// Int32s adds an array of int32.
func (b *Builder) Int32s(name string, values ...int32) {
	v := append(U32(5), U64(uint64(len(values)))...)
	for _, n := range values {
		v = append(v, U32(uint32(n))...)
	}
	b.Key(name, 9, v)
}

// Tensor adds a tensor; shape is row-major.
func (b *Builder) Tensor(name string, typ uint32, shape []int64, data []byte) {
	b.tensors++
	b.table = append(b.table, Str(name)...)
	b.table = append(b.table, U32(uint32(len(shape)))...)
	for i := len(shape) - 1; i >= 0; i-- {
		b.table = append(b.table, U64(uint64(shape[i]))...)
	}
	b.table = append(b.table, U32(typ)...)
	b.table = append(b.table, U64(uint64(len(b.data)))...)
	b.data = append(b.data, data...)
	for len(b.data)%align != 0 {
		b.data = append(b.data, 0)
	}
}

// Bytes returns the file.
func (b *Builder) Bytes() []byte {
	out := append([]byte("GGUF"), U32(3)...)
	out = append(out, U64(uint64(b.tensors))...)
	out = append(out, U64(uint64(b.keys))...)
	out = append(append(out, b.meta...), b.table...)
	for len(out)%align != 0 {
		out = append(out, 0)
	}
	return append(out, b.data...)
}

// Package config owns reading a model's config.json: typed access to keys, defaults, and errors that name the key.
//
// Readers never stop at the first fault: they return a harmless value, and Err reports everything at once.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

// FileName is the config's name within a model folder.
const FileName = "config.json"

// maxSize bounds a dimension or a count: anything above is a broken file, and products of two stay within int64.
const maxSize = 1 << 31

// Object is one JSON object of a config. Objects of one file share their errors.
type Object struct {
	path   string // dotted keys from the root, empty at the root
	values map[string]any
	faults *faults
}

type faults struct {
	file     string
	messages []string
	code     sdk.Code
}

// Read reads config.json of the model folder dir.
func Read(dir string) (*Object, error) {
	path := filepath.Join(dir, FileName)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, statErr := os.Stat(dir); statErr != nil {
			return nil, &sdk.Error{Code: sdk.CodeNotFound, File: dir, Message: fmt.Sprintf("no model folder %s", dir)}
		}
		return nil, &sdk.Error{Code: sdk.CodeNotFound, File: path, Message: fmt.Sprintf("no %s in %s: not a model folder", FileName, dir)}
	}
	if err != nil {
		return nil, &sdk.Error{Code: sdk.CodeNotFound, File: path, Message: fmt.Sprintf("reading the config: %v", err)}
	}
	return Parse(raw, path)
}

// Parse reads a config from raw JSON; file is for errors. Beyond JSON it takes what Python's json module writes
// for floats that are not finite (bare Infinity, -Infinity, NaN), and transformers' {"__float__": "Infinity"}.
func Parse(raw []byte, file string) (*Object, error) {
	corrupt := func(err error) error {
		return &sdk.Error{Code: sdk.CodeCorrupt, File: file, Message: fmt.Sprintf("%s is not a JSON object: %v", file, err)}
	}
	d := json.NewDecoder(bytes.NewReader(quoteNonFinite(raw)))
	d.UseNumber()
	var values map[string]any
	if err := d.Decode(&values); err != nil {
		return nil, corrupt(err)
	}
	if d.More() {
		return nil, corrupt(errors.New("data after the object"))
	}
	if values == nil {
		return nil, corrupt(errors.New("null"))
	}
	return &Object{values: values, faults: &faults{file: file}}, nil
}

// nonFinite maps the spellings of floats that JSON lacks.
var nonFinite = map[string]float64{"Infinity": math.Inf(1), "-Infinity": math.Inf(-1), "NaN": math.NaN()}

// quoteNonFinite replaces bare Infinity, -Infinity and NaN outside strings by their tagged form.
func quoteNonFinite(raw []byte) []byte {
	var out []byte
	for i := 0; i < len(raw); {
		if raw[i] == '"' {
			end := stringEnd(raw, i)
			out = append(out, raw[i:end]...)
			i = end
			continue
		}
		word := nonFiniteAt(raw[i:])
		if word == "" {
			out = append(out, raw[i])
			i++
			continue
		}
		out = fmt.Appendf(out, `{"__float__":%q}`, word)
		i += len(word)
	}
	return out
}

func nonFiniteAt(raw []byte) string {
	for word := range nonFinite {
		if bytes.HasPrefix(raw, []byte(word)) {
			return word
		}
	}
	return ""
}

// stringEnd returns the index after the JSON string that starts at raw[at].
func stringEnd(raw []byte, at int) int {
	for i := at + 1; i < len(raw); i++ {
		switch raw[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(raw)
}

// Err returns every fault found so far as one *sdk.Error, nil if there is none.
func (o *Object) Err() error {
	f := o.faults
	if len(f.messages) == 0 {
		return nil
	}
	return &sdk.Error{Code: f.code, File: f.file, Message: f.file + ": " + strings.Join(f.messages, "; ")}
}

// Fail records a fault of key: a value that makes no sense.
func (o *Object) Fail(key, format string, args ...any) {
	o.record(sdk.CodeInvalid, key, format, args...)
}

// Unsupported records that key has a value that is well formed but not built.
func (o *Object) Unsupported(key, format string, args ...any) {
	o.record(sdk.CodeUnsupported, key, format, args...)
}

func (o *Object) record(code sdk.Code, key, format string, args ...any) {
	f := o.faults
	if len(f.messages) == 0 || code == sdk.CodeInvalid {
		f.code = code
	}
	f.messages = append(f.messages, o.key(key)+": "+fmt.Sprintf(format, args...))
}

func (o *Object) key(key string) string {
	if o.path == "" {
		return key
	}
	return o.path + "." + key
}

// Has reports whether key is there and not null.
func (o *Object) Has(key string) bool { return o.values[key] != nil }

// Size returns a required dimension or count, at least 1.
func (o *Object) Size(key string) int {
	if !o.require(key) {
		return 1
	}
	return o.SizeOr(key, 1)
}

// SizeOr is Size with a default for a key that is absent or null.
func (o *Object) SizeOr(key string, def int) int {
	if !o.Has(key) {
		return def
	}
	f, ok := o.number(key)
	if !ok {
		return max(def, 1)
	}
	if f != math.Trunc(f) || f < 1 || f > maxSize {
		o.Fail(key, "is %v, want a whole number from 1 to %d", f, maxSize)
		return max(def, 1)
	}
	return int(f)
}

// Count returns a required number of something that there may be none of.
func (o *Object) Count(key string) int {
	if !o.require(key) {
		return 0
	}
	return o.CountOr(key, 0)
}

// CountOr is Count with a default for a key that is absent or null.
func (o *Object) CountOr(key string, def int) int {
	if !o.Has(key) {
		return def
	}
	f, ok := o.number(key)
	if !ok {
		return def
	}
	if f != math.Trunc(f) || f < 0 || f > maxSize {
		o.Fail(key, "is %v, want a whole number from 0 to %d", f, maxSize)
		return def
	}
	return int(f)
}

// FloatOr returns a number, def if the key is absent or null. It may be infinite or NaN.
func (o *Object) FloatOr(key string, def float64) float64 {
	if !o.Has(key) {
		return def
	}
	f, ok := o.number(key)
	if !ok {
		return def
	}
	return f
}

// PositiveOr returns a finite number above zero, def if the key is absent or null.
func (o *Object) PositiveOr(key string, def float64) float64 {
	f := o.FloatOr(key, def)
	if !(f > 0) || math.IsInf(f, 0) {
		o.Fail(key, "is %v, want a finite number above 0", f)
		return def
	}
	return f
}

// Positive is PositiveOr for a required key.
func (o *Object) Positive(key string) float64 {
	if !o.require(key) {
		return 1
	}
	return o.PositiveOr(key, 1)
}

// BoolOr returns a truth value, def if the key is absent or null.
func (o *Object) BoolOr(key string, def bool) bool {
	if !o.Has(key) {
		return def
	}
	b, ok := o.values[key].(bool)
	if !ok {
		o.Fail(key, "is %s, want true or false", show(o.values[key]))
		return def
	}
	return b
}

// StringOr returns a string, def if the key is absent or null.
func (o *Object) StringOr(key, def string) string {
	if !o.Has(key) {
		return def
	}
	s, ok := o.values[key].(string)
	if !ok {
		o.Fail(key, "is %s, want a string", show(o.values[key]))
		return def
	}
	return s
}

// Strings returns a list of strings, nil if the key is absent or null.
func (o *Object) Strings(key string) []string {
	return list(o, key, "a string", func(v any) (string, bool) { s, ok := v.(string); return s, ok })
}

// Bools returns a list of truth values, nil if the key is absent or null.
func (o *Object) Bools(key string) []bool {
	return list(o, key, "true or false", func(v any) (bool, bool) { b, ok := v.(bool); return b, ok })
}

// Integers returns a list of whole numbers, nil if the key is absent or null.
func (o *Object) Integers(key string) []int64 { return list(o, key, "a whole number", Integer) }

// list reads a list of what read takes; want names one of them.
func list[T any](o *Object, key, want string, read func(any) (T, bool)) []T {
	if !o.Has(key) {
		return nil
	}
	values, ok := o.values[key].([]any)
	if !ok {
		o.Fail(key, "is %s, want a list", show(o.values[key]))
		return nil
	}
	out := make([]T, 0, len(values))
	for i, v := range values {
		x, ok := read(v)
		if !ok {
			o.Fail(fmt.Sprintf("%s[%d]", key, i), "is %s, want %s", show(v), want)
			return nil
		}
		out = append(out, x)
	}
	return out
}

// PerLayer returns a list with one of the built words for each of so many layers, nil if the key is absent or null.
func (o *Object) PerLayer(key string, layers int, built ...string) []string {
	words := o.Strings(key)
	if words == nil {
		return nil
	}
	if len(words) != layers {
		o.Fail(key, "has %d entries for %d layers", len(words), layers)
	}
	for i, word := range words {
		if !slices.Contains(built, word) {
			o.Unsupported(fmt.Sprintf("%s[%d]", key, i), "%q is not built; built are %s", word, strings.Join(built, ", "))
		}
	}
	return words
}

// Divides records a fault unless n, the value of key, divides what the key of says.
func (o *Object) Divides(key string, n int, of string, whole int) {
	if whole%n != 0 {
		o.Fail(key, "is %d, which does not divide %s %d", n, of, whole)
	}
}

// Even records a fault unless n, the value of key, is even.
func (o *Object) Even(key string, n int) {
	if n%2 != 0 {
		o.Fail(key, "is %d, want an even number", n)
	}
}

// Object returns the object under key, nil if the key is absent, null or no object; the last is a fault.
func (o *Object) Object(key string) *Object {
	if !o.Has(key) {
		return nil
	}
	m, ok := o.values[key].(map[string]any)
	if !ok {
		o.Fail(key, "is %s, want an object", show(o.values[key]))
		return nil
	}
	return &Object{path: o.key(key), values: m, faults: o.faults}
}

// Keys returns the object's keys in order.
func (o *Object) Keys() []string {
	keys := make([]string, 0, len(o.values))
	for k := range o.values {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Value returns the raw value under key: nil, bool, string, json.Number, []any or map[string]any.
func (o *Object) Value(key string) any { return o.values[key] }

// OneOf records an Unsupported fault unless the string under key, def if absent, is among the built values.
func (o *Object) OneOf(key, def string, built ...string) string {
	s := o.StringOr(key, def)
	if !slices.Contains(built, s) {
		o.Unsupported(key, "%q is not built; built are %s", s, strings.Join(built, ", "))
	}
	return s
}

func (o *Object) require(key string) bool {
	if o.Has(key) {
		return true
	}
	o.Fail(key, "is missing")
	return false
}

func (o *Object) number(key string) (float64, bool) {
	f, ok := Number(o.values[key])
	if !ok {
		o.Fail(key, "is %s, want a number", show(o.values[key]))
	}
	return f, ok
}

// Number returns v, a value of a config, as a number, which may be infinite or NaN.
func Number(v any) (float64, bool) {
	switch v := v.(type) {
	case json.Number:
		f, err := v.Float64()
		return f, err == nil
	case map[string]any:
		tag, _ := v["__float__"].(string)
		f, ok := nonFinite[tag]
		return f, ok && len(v) == 1
	}
	return 0, false
}

// show prints a value for an error, cut to a readable length.
func show(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprintf("%T", v)
	}
	if len(raw) > 60 {
		return string(raw[:60]) + "…"
	}
	return string(raw)
}

// Integer returns v, a value of a config, as a whole number.
func Integer(v any) (int64, bool) {
	n, ok := v.(json.Number)
	if !ok {
		return 0, false
	}
	i, err := n.Int64()
	return i, err == nil
}

// Package jsonbody owns reading JSON request bodies strictly: what it refuses, it refuses with the path of the field and with
// what was wanted and what was there.
package jsonbody

import (
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Error is what is wrong with a body.
type Error struct {
	Path    string // such as "messages[1].content"; empty for the body as a whole
	Message string
}

func (e *Error) Error() string {
	if e.Path == "" {
		return e.Message
	}
	return e.Path + ": " + e.Message
}

// document is what the values of one body share.
type document struct {
	err *Error
}

// Value is one value of a body. A read of the wrong type gives a zero value and makes the body's first error; so the fields of
// a body can be read in a row, and Object.Err asked once.
type Value struct {
	doc  *document
	path string
	raw  jsontext.Value
}

// Object is an object of a body. A member that is null counts as absent.
type Object struct {
	Value
	names   []string
	members map[string]jsontext.Value
	read    map[string]bool
}

// Parse reads a body, which must be one object. Text that is no UTF-8 and names given twice are refused. The error is an *Error.
func Parse(body []byte) (*Object, error) {
	d := jsontext.NewDecoder(bytes.NewReader(body))
	raw, err := d.ReadValue()
	if err == nil {
		raw = raw.Clone() // the decoder's buffer moves on
		if _, after := d.ReadToken(); !errors.Is(after, io.EOF) {
			err = errors.New("more follows the object")
		}
	}
	if err != nil {
		return nil, malformed(err)
	}
	v := Value{doc: &document{}, raw: raw}
	o := v.Object()
	return o, o.Err()
}

func malformed(err error) *Error {
	e := &Error{Message: "the body is not valid JSON: " + strings.TrimPrefix(err.Error(), "jsontext: ")}
	if errors.Is(err, io.EOF) {
		e.Message = "the body is empty, wanted a JSON object"
	}
	if s, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		e.Path = path(s.JSONPointer)
		e.Message = fmt.Sprintf("the body is not valid JSON: %v at byte %d", s.Err, s.ByteOffset)
	}
	return e
}

// path writes a JSON pointer as programmers write it.
func path(p jsontext.Pointer) string {
	out := ""
	for token := range p.Tokens() {
		if _, err := strconv.ParseUint(token, 10, 32); err == nil && out != "" {
			out += "[" + token + "]"
		} else {
			out = join(out, token)
		}
	}
	return out
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// Path returns where the value stands.
func (v Value) Path() string { return v.path }

// Raw returns the value's JSON.
func (v Value) Raw() jsontext.Value { return v.raw }

// Err returns the first thing that was wrong with the body, as an *Error, or nil.
func (v Value) Err() error {
	if v.doc.err == nil {
		return nil
	}
	return v.doc.err
}

// Fail notes that the value is wrong. Only the first error of a body counts.
func (v Value) Fail(format string, args ...any) {
	if v.doc.err == nil {
		v.doc.err = &Error{Path: v.path, Message: fmt.Sprintf(format, args...)}
	}
}

// Want notes that the value is of the wrong type.
func (v Value) Want(what string) { v.Fail("wanted %s, got %s", what, v.kind()) }

func (v Value) kind() string {
	switch v.raw.Kind() {
	case '"':
		return "a string"
	case '0':
		return "the number " + string(v.raw)
	case 't', 'f':
		return string(v.raw)
	case '{':
		return "an object"
	case '[':
		return "an array"
	}
	return "null"
}

// IsString, IsArray, IsObject and IsNumber tell the value's type.
func (v Value) IsString() bool { return v.raw.Kind() == '"' }
func (v Value) IsArray() bool  { return v.raw.Kind() == '[' }
func (v Value) IsObject() bool { return v.raw.Kind() == '{' }
func (v Value) IsNumber() bool { return v.raw.Kind() == '0' }

// Text reads a string.
func (v Value) Text() string {
	if !v.IsString() {
		v.Want("a string")
		return ""
	}
	s, err := jsontext.AppendUnquote(nil, v.raw)
	if err != nil {
		v.Fail("%v", err)
	}
	return string(s)
}

// Bool reads true or false.
func (v Value) Bool() bool {
	k := v.raw.Kind()
	if k != 't' && k != 'f' {
		v.Want("true or false")
	}
	return k == 't'
}

// Int reads a whole number from low to high. 3.0 is one.
func (v Value) Int(low, high int64) int64 {
	want := fmt.Sprintf("a whole number from %d to %d", low, high)
	if !v.IsNumber() {
		v.Want(want)
		return low
	}
	n, err := strconv.ParseInt(string(v.raw), 10, 64)
	if err != nil {
		f, _ := strconv.ParseFloat(string(v.raw), 64)
		if f != math.Trunc(f) || math.Abs(f) >= 1<<63 {
			v.Want(want)
			return low
		}
		n = int64(f)
	}
	if n < low || n > high {
		v.Want(want)
		return low
	}
	return n
}

// Number reads a number from low to high.
func (v Value) Number(low, high float64) float64 {
	f, err := strconv.ParseFloat(string(v.raw), 64)
	if !v.IsNumber() || err != nil || f < low || f > high {
		v.Want(fmt.Sprintf("a number from %v to %v", low, high))
		return low
	}
	return f
}

// Array reads the elements of an array.
func (v Value) Array() []Value {
	if !v.IsArray() {
		v.Want("an array")
		return nil
	}
	d := jsontext.NewDecoder(bytes.NewReader(v.raw))
	v.token(d)
	var out []Value
	for d.PeekKind() != ']' {
		raw, err := d.ReadValue()
		if err != nil { // Parse has read it before
			v.Fail("%v", err)
			return nil
		}
		out = append(out, Value{v.doc, fmt.Sprintf("%s[%d]", v.path, len(out)), raw.Clone()})
	}
	return out
}

// Object reads the members of an object.
func (v Value) Object() *Object {
	o := &Object{Value: v, members: map[string]jsontext.Value{}, read: map[string]bool{}}
	if !v.IsObject() {
		v.Want("an object")
		return o
	}
	d := jsontext.NewDecoder(bytes.NewReader(v.raw))
	v.token(d)
	for d.PeekKind() != '}' {
		name := v.token(d)
		raw, err := d.ReadValue()
		if err != nil { // Parse has read it before
			v.Fail("%v", err)
			return o
		}
		o.names = append(o.names, name)
		o.members[name] = raw.Clone()
	}
	return o
}

func (v Value) token(d *jsontext.Decoder) string {
	t, err := d.ReadToken()
	if err != nil { // Parse has read it before
		v.Fail("%v", err)
		return ""
	}
	return t.String()
}

// Names returns the names of all members, in order.
func (o *Object) Names() []string { return o.names }

// Get returns a member; false where it is absent or null.
func (o *Object) Get(name string) (Value, bool) {
	o.read[name] = true
	raw := o.members[name]
	return Value{o.doc, join(o.path, name), raw}, len(raw) > 0 && raw.Kind() != 'n'
}

// Need returns a member that must be there.
func (o *Object) Need(name string) (Value, bool) {
	v, ok := o.Get(name)
	if !ok {
		v.Fail("is missing")
	}
	return v, ok
}

// Asked returns the names that were asked for, whether they are there or not.
func (o *Object) Asked() []string { return slices.Sorted(maps.Keys(o.read)) }

// Unread returns the members that nobody has asked for and that are not null.
func (o *Object) Unread() []string {
	var out []string
	for _, name := range o.names {
		if !o.read[name] && o.members[name].Kind() != 'n' {
			out = append(out, name)
		}
	}
	return out
}

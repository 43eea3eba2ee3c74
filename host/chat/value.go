package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/ardanlabs/jinja"
)

// maxNesting bounds how deep JSON for a template may be nested. Templates walk
// it with recursive macros, and Python's own limit is of this order.
const maxNesting = 100

// decodeValue turns JSON into a template's value. Objects keep the order of
// their members; whole numbers stay whole. Of a member given twice the last
// value counts, as in Python.
func decodeValue(raw []byte) (jinja.Value, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	v, err := nextValue(d, 0)
	if err != nil {
		return jinja.Value{}, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return jinja.Value{}, errors.New("more follows the JSON value")
	}
	return v, nil
}

func nextValue(d *json.Decoder, depth int) (jinja.Value, error) {
	if depth > maxNesting {
		return jinja.Value{}, &LimitError{What: "levels of nested JSON", Limit: maxNesting}
	}
	token, err := d.Token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return jinja.Value{}, err
	}
	switch t := token.(type) {
	case json.Delim:
		if t == '[' {
			return nextList(d, depth)
		}
		return nextDict(d, depth)
	case json.Number:
		return number(t)
	case string:
		return jinja.NewString(t), nil
	case bool:
		return jinja.NewBool(t), nil
	}
	return jinja.None(), nil
}

func nextList(d *json.Decoder, depth int) (jinja.Value, error) {
	var items []jinja.Value
	for d.More() {
		v, err := nextValue(d, depth+1)
		if err != nil {
			return jinja.Value{}, err
		}
		items = append(items, v)
	}
	_, err := d.Token()
	return jinja.NewList(items), err
}

func nextDict(d *json.Decoder, depth int) (jinja.Value, error) {
	dict := jinja.NewDict()
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return jinja.Value{}, err
		}
		v, err := nextValue(d, depth+1)
		if err != nil {
			return jinja.Value{}, err
		}
		dict.AsDict().Set(key.(string), v)
	}
	_, err := d.Token()
	return dict, err
}

// number keeps Python's distinction of int and float. The engine has no whole
// numbers past 64 bits: those become floats.
func number(n json.Number) (jinja.Value, error) {
	if !strings.ContainsAny(string(n), ".eE") {
		if i, err := n.Int64(); err == nil {
			return jinja.NewInt(i), nil
		}
	}
	f, err := n.Float64()
	if err != nil {
		return jinja.Value{}, fmt.Errorf("number %s is out of range: %w", n, err)
	}
	return jinja.NewFloat(f), nil
}

package config

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

func parse(t *testing.T, text string) *Object {
	t.Helper()
	o, err := Parse([]byte(text), "config.json")
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestValues(t *testing.T) {
	o := parse(t, `{"n": 3, "whole": 4.0, "eps": 1e-5, "flag": true, "name": "silu", "nothing": null,
		"kinds": ["a", "b"], "flags": [true, false], "layers": [0, -3], "none": 0, "rope": {"factor": 8}, "bare": -Infinity, "tagged": {"__float__": "NaN"}, "text": "Infinity \" NaN"}`)
	if n := o.Size("n"); n != 3 {
		t.Errorf("n is %d", n)
	}
	if n := o.Size("whole"); n != 4 {
		t.Errorf("whole is %d", n)
	}
	if n := o.SizeOr("nothing", 7); n != 7 {
		t.Errorf("null gives %d, want the default", n)
	}
	if f := o.Positive("eps"); f != 1e-5 {
		t.Errorf("eps is %v", f)
	}
	if !o.BoolOr("flag", false) || o.BoolOr("absent", false) {
		t.Error("flag")
	}
	if s := o.OneOf("name", "", "silu"); s != "silu" {
		t.Errorf("name is %q", s)
	}
	if k := o.Strings("kinds"); len(k) != 2 || k[1] != "b" {
		t.Errorf("kinds are %v", k)
	}
	if b := o.Bools("flags"); len(b) != 2 || !b[0] || b[1] || o.Bools("absent") != nil {
		t.Errorf("flags are %v", b)
	}
	if n := o.Integers("layers"); len(n) != 2 || n[0] != 0 || n[1] != -3 {
		t.Errorf("layers are %v", n)
	}
	if k := o.PerLayer("kinds", 2, "a", "b"); len(k) != 2 || k[0] != "a" || o.PerLayer("absent", 2) != nil {
		t.Errorf("kinds of layers are %v", k)
	}
	if n, none, absent := o.Count("n"), o.Count("none"), o.CountOr("absent", 7); n != 3 || none != 0 || absent != 7 {
		t.Errorf("counts are %d, %d and %d", n, none, absent)
	}
	o.Divides("n", 3, "whole", 12)
	o.Even("whole", 4)
	if n := o.Object("rope").Size("factor"); n != 8 {
		t.Errorf("rope.factor is %d", n)
	}
	if o.Object("absent") != nil {
		t.Error("an absent object is not nil")
	}
	if f := o.FloatOr("bare", 0); !math.IsInf(f, -1) {
		t.Errorf("bare is %v", f)
	}
	if f := o.FloatOr("tagged", 0); !math.IsNaN(f) {
		t.Errorf("tagged is %v", f)
	}
	if s := o.StringOr("text", ""); s != `Infinity " NaN` {
		t.Errorf("text is %q", s)
	}
	if err := o.Err(); err != nil {
		t.Error(err)
	}
}

func TestFaultsNameTheKey(t *testing.T) {
	cases := []struct {
		name, text string
		read       func(*Object)
		code       sdk.Code
		want       string
	}{
		{"missing", `{}`, func(o *Object) { o.Size("hidden_size") }, sdk.CodeInvalid, "hidden_size: is missing"},
		{"zero", `{"n": 0}`, func(o *Object) { o.Size("n") }, sdk.CodeInvalid, "n: is 0"},
		{"fraction", `{"n": 1.5}`, func(o *Object) { o.SizeOr("n", 1) }, sdk.CodeInvalid, "n: is 1.5"},
		{"huge", `{"n": 1e300}`, func(o *Object) { o.Size("n") }, sdk.CodeInvalid, "n: is 1e+300"},
		{"text for number", `{"n": "3"}`, func(o *Object) { o.Size("n") }, sdk.CodeInvalid, `n: is "3", want a number`},
		{"infinite", `{"f": Infinity}`, func(o *Object) { o.Positive("f") }, sdk.CodeInvalid, "f: is +Inf"},
		{"number for bool", `{"b": 1}`, func(o *Object) { o.BoolOr("b", false) }, sdk.CodeInvalid, "b: is 1, want true or false"},
		{"number in list", `{"l": ["a", 2]}`, func(o *Object) { o.Strings("l") }, sdk.CodeInvalid, "l[1]: is 2"},
		{"no list", `{"l": 3}`, func(o *Object) { o.Strings("l") }, sdk.CodeInvalid, "l: is 3, want a list"},
		{"number in bools", `{"l": [true, 1]}`, func(o *Object) { o.Bools("l") }, sdk.CodeInvalid, "l[1]: is 1, want true or false"},
		{"fraction in list", `{"l": [1.5]}`, func(o *Object) { o.Integers("l") }, sdk.CodeInvalid, "l[0]: is 1.5, want a whole number"},
		{"too few layers", `{"l": ["a"]}`, func(o *Object) { o.PerLayer("l", 2, "a") }, sdk.CodeInvalid, "l: has 1 entries for 2 layers"},
		{"a layer not built", `{"l": ["a", "b"]}`, func(o *Object) { o.PerLayer("l", 2, "a", "c") }, sdk.CodeUnsupported,
			`l[1]: "b" is not built; built are a, c`},
		{"missing count", `{}`, func(o *Object) { o.Count("n") }, sdk.CodeInvalid, "n: is missing"},
		{"negative count", `{"n": -1}`, func(o *Object) { o.CountOr("n", 2) }, sdk.CodeInvalid, "n: is -1, want a whole number from 0"},
		{"indivisible", `{}`, func(o *Object) { o.Divides("kv", 3, "heads", 8) }, sdk.CodeInvalid, "kv: is 3, which does not divide heads 8"},
		{"odd", `{}`, func(o *Object) { o.Even("dim", 3) }, sdk.CodeInvalid, "dim: is 3, want an even number"},
		{"nested", `{"rope": {"factor": -1}}`, func(o *Object) { o.Object("rope").Positive("factor") }, sdk.CodeInvalid, "rope.factor: is -1"},
		{"not built", `{"act": "gelu"}`, func(o *Object) { o.OneOf("act", "silu", "silu") }, sdk.CodeUnsupported, `act: "gelu" is not built; built are silu`},
		{"invalid outranks not built", `{"act": "gelu"}`, func(o *Object) { o.OneOf("act", "silu", "silu"); o.Size("n") }, sdk.CodeInvalid, "n: is missing"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			o := parse(t, c.text)
			c.read(o)
			err := o.Err()
			if err == nil {
				t.Fatal("no error")
			}
			if sdk.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v (%v), want %v with %q", err, sdk.CodeOf(err), c.code, c.want)
			}
		})
	}
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	_, err := Read(filepath.Join(dir, "absent"))
	if sdk.CodeOf(err) != sdk.CodeNotFound || !strings.Contains(err.Error(), "no model folder") {
		t.Errorf("absent folder: %v", err)
	}
	_, err = Read(dir)
	if sdk.CodeOf(err) != sdk.CodeNotFound || !strings.Contains(err.Error(), "no config.json") {
		t.Errorf("folder without config: %v", err)
	}
	for _, text := range []string{"", "null", "[]", "{", `{"a":1} {"b":2}`, `{"a": Infinit}`} {
		if err := os.WriteFile(filepath.Join(dir, FileName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(dir); sdk.CodeOf(err) != sdk.CodeCorrupt {
			t.Errorf("%q: %v, want a corrupt file", text, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"n": 3, "x": Infinity, "y": {"__float__": "-Infinity"}, "s": "a\"NaN", "o": {"k": [1, null]}}`))
	f.Add([]byte(`{"n": -Infinity}`))
	f.Add([]byte("{\"n\": \"\\"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		o, err := Parse(raw, "config.json")
		if err != nil {
			if sdk.CodeOf(err) != sdk.CodeCorrupt {
				t.Fatalf("%v is not typed", err)
			}
			return
		}
		for _, k := range o.Keys() {
			if n := o.SizeOr(k, 5); n < 1 || n > maxSize {
				t.Fatalf("size %d out of bounds", n)
			}
			if p := o.PositiveOr(k, 1); !(p > 0) || math.IsInf(p, 0) {
				t.Fatalf("%v is not positive", p)
			}
			o.FloatOr(k, 0)
			o.BoolOr(k, false)
			o.StringOr(k, "")
			if n := o.CountOr(k, 5); n < 0 || n > maxSize {
				t.Fatalf("count %d out of bounds", n)
			}
			o.Strings(k)
			o.Integers(k)
			o.Bools(k)
			o.PerLayer(k, 2, "a")
			o.Object(k)
		}
		_ = o.Err()
	})
}

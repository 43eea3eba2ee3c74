package jsonbody

import (
	"strings"
	"testing"
)

func TestParseRefuses(t *testing.T) {
	for _, tc := range []struct{ name, body, path, message string }{
		{"nothing", "", "", "the body is empty"},
		{"no JSON", "hello", "", "the body is not valid JSON"},
		{"cut off", `{"a": {"b": [1, 2`, "a.b", "the body is not valid JSON"},
		{"trailing comma", `{"a": [1, {"b": 1,}]}`, "a[1]", "the body is not valid JSON"},
		{"more follows", `{} {}`, "", "more follows the object"},
		{"a name twice", `{"a": 1, "b": {"c": 1, "c": 2}}`, "b.c", "duplicate"},
		{"no UTF-8", "{\"a\": [\"x\xff\"]}", "a[0]", "invalid UTF-8"},
		{"half a surrogate pair", `{"a": "\ud800"}`, "a", "surrogate"},
		{"an array", `[1]`, "", "wanted an object, got an array"},
		{"null", `null`, "", "wanted an object, got null"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse([]byte(tc.body))
			e, ok := err.(*Error)
			if !ok || e.Path != tc.path || !strings.Contains(e.Message, tc.message) {
				t.Errorf("got %#v, want path %q and %q", err, tc.path, tc.message)
			}
		})
	}
}

func TestReadsNameFieldAndTypes(t *testing.T) {
	for _, tc := range []struct {
		name, body, err string
		read            func(o *Object)
	}{
		{"text", `{"a": 5}`, "a: wanted a string, got the number 5", func(o *Object) { v, _ := o.Get("a"); v.Text() }},
		{"nested", `{"m": [{"c": {}}]}`, "m[0].c: wanted a string, got an object", func(o *Object) {
			v, _ := o.Get("m")
			c, _ := v.Array()[0].Object().Get("c")
			c.Text()
		}},
		{"bool", `{"a": "true"}`, "a: wanted true or false, got a string", func(o *Object) { v, _ := o.Get("a"); v.Bool() }},
		{"fraction", `{"a": 1.5}`, "a: wanted a whole number from 0 to 9, got the number 1.5", func(o *Object) { v, _ := o.Get("a"); v.Int(0, 9) }},
		{"past the range", `{"a": 10}`, "a: wanted a whole number from 0 to 9, got the number 10", func(o *Object) { v, _ := o.Get("a"); v.Int(0, 9) }},
		{"past int64", `{"a": 1e300}`, "a: wanted a whole number from 0 to 9, got the number 1e300", func(o *Object) { v, _ := o.Get("a"); v.Int(0, 9) }},
		{"past float64", `{"a": 1e999}`, "a: wanted a number from 0 to 9, got the number 1e999", func(o *Object) { v, _ := o.Get("a"); v.Number(0, 9) }},
		{"missing", `{}`, "a: is missing", func(o *Object) { o.Need("a") }},
		{"null is missing", `{"a": null}`, "a: is missing", func(o *Object) { o.Need("a") }},
		{"the first counts", `{"a": 1, "b": 2}`, "b: wanted an array, got the number 2", func(o *Object) {
			v, _ := o.Get("b")
			v.Array()
			v, _ = o.Get("a")
			v.Text()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o, err := Parse([]byte(tc.body))
			if err != nil {
				t.Fatal(err)
			}
			tc.read(o)
			if err := o.Err(); err == nil || err.Error() != tc.err {
				t.Errorf("got %v, want %s", err, tc.err)
			}
		})
	}
}

func TestReads(t *testing.T) {
	o, err := Parse([]byte(`{"s": "a\u00e9\n", "i": -3, "whole": 3.0, "power": 1e2, "f": 0.5, "b": true, "list": [1, "x"], "none": null, "rest": 1}`))
	if err != nil {
		t.Fatal(err)
	}
	get := func(name string) Value { v, _ := o.Get(name); return v }
	if s := get("s").Text(); s != "aé\n" {
		t.Errorf("text %q", s)
	}
	if a, b, c := get("i").Int(-9, 9), get("whole").Int(0, 9), get("power").Int(0, 100); a != -3 || b != 3 || c != 100 {
		t.Errorf("numbers %d, %d, %d", a, b, c)
	}
	if f := get("f").Number(0, 1); f != 0.5 || !get("b").Bool() {
		t.Errorf("number %v", f)
	}
	if list := get("list").Array(); len(list) != 2 || list[1].Text() != "x" || list[1].Path() != "list[1]" {
		t.Errorf("list %v", list)
	}
	if _, ok := o.Get("none"); ok {
		t.Error("null is there")
	}
	if u := o.Unread(); len(u) != 1 || u[0] != "rest" {
		t.Errorf("unread %v", u)
	}
	if o.Err() != nil {
		t.Error(o.Err())
	}
}

// FuzzParse walks whatever was read: no input may do more than end in an error.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{`{"a":[1,{"b":null}],"c":"\ud83d\ude00"}`, `{"a":{"a":{"a":[[[]]]}}}`, "{\"a\":\"\xff\"}", `{"n":1e999}`, `[]`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		o, err := Parse(body)
		if err == nil {
			walk(o.Value, 0)
		}
	})
}

func walk(v Value, depth int) {
	if depth > 50 {
		return
	}
	v.Text()
	v.Bool()
	v.Int(0, 10)
	v.Number(0, 1)
	if v.IsArray() {
		for _, e := range v.Array() {
			walk(e, depth+1)
		}
	}
	if v.IsObject() {
		o := v.Object()
		for _, name := range o.Names() {
			e, _ := o.Get(name)
			walk(e, depth+1)
		}
	}
}

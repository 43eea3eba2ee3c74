package chat

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/ardanlabs/jinja"
)

func TestStrftime(t *testing.T) {
	at := time.Date(2026, 3, 5, 9, 7, 8, 123456789, time.UTC)
	for format, want := range map[string]string{
		"%Y-%m-%d": "2026-03-05", "%d %B %Y": "05 March 2026", "%-d/%-m": "5/3", "%H%M%S": "090708", "%-H": "9",
		"%I %p": "09 AM", "%a %A %b %h": "Thu Thursday Mar Mar", "%j %-j": "064 64", "%y": "26", "%e|%-e": " 5|5",
		"%F %T %R %D": "2026-03-05 09:07:08 09:07 03/05/26", "%f": "123456", "%w %u": "4 4", "%%": "%", "%n%t": "\n\t",
		"%z%Z": "", "%s": "1772701628", "%Q %-Q %": "%Q %-Q %", "": "", "2006 Jan": "2006 Jan",
		"%c": "Thu Mar  5 09:07:08 2026", "%x %X": "03/05/26 09:07:08",
	} {
		if got := strftime(at, format); got != want {
			t.Errorf("%q: got %q, want %q", format, got, want)
		}
	}
	if got := strftime(time.Date(2026, 3, 8, 0, 0, 0, 0, time.UTC), "%-H %u %w"); got != "0 7 0" {
		t.Errorf("Sunday at midnight: %q", got)
	}
}

func TestAdapt(t *testing.T) {
	for body, want := range map[string]string{
		" a ":                        "a",
		"f(*a, b)":                   "f|__apply(a, b)",
		"f[0](* a)":                  "f[0]|__apply( a)",
		"f(**a)":                     "f(**a)",
		"2 * (3)":                    "2 * (3)",
		"a . rsplit('x', 1)[0]":      "a |__rsplit('x', 1)[0]",
		"a.rsplit":                   "a.rsplit",
		"a.splitlines()":             "a|__splitlines()",
		"'.rsplit(' ~ \"null\\\"\"":  "'.rsplit(' ~ \"null\\\"\"",
		"a|format(b)|title":          "a|__format(b)|__title",
		"'{}'.format(b)":             "'{}'.format(b)",
		"format":                     "format",
		"x is iterable and y":        "x |__iterable and y",
		"x is not  sequence":         "x |__not_sequence",
		"x is not none":              "x is not none",
		"x is iterables":             "x is iterables",
		"this is":                    "this is",
		"n.items":                    "n|__attribute('items')",
		"n.items()":                  "n.items()",
		"set n.items = n.items + []": "set n.items = n|__attribute('items') + []",
		"n.items == 1":               "n|__attribute('items') == 1",
		"n.items_":                   "n.items_",
		"null":                       "__undefined",
		"f(null=1)":                  "f(null=1)",
		"a.null":                     "a.null",
		"1.5 + a.0":                  "1.5 + a.0",
		"'open":                      "'open",
		"é.x":                        "é.x",
		".":                          ".",
	} {
		if got := adapt(body); got != want {
			t.Errorf("%q: got %q, want %q", body, got, want)
		}
	}
}

// FuzzPrepare looks for sources that make the preparation of a template panic,
// and checks that a template whose whitespace is resolved stays as it is.
func FuzzPrepare(f *testing.F) {
	for _, s := range []string{
		"a {%- if true -%} b {% endif %}\n", "{{ '{{' }}{# x #}{", "{% raw %}{{ {% endraw -%} x", "{%+ set x = 1 +%}\r\n",
		"{% macro f(x) %}{{ x.rsplit('a') }}{% endmacro %}{{ f(*y) }}", "{{ x is not iterable }}{{ null }}",
	} {
		f.Add(s)
	}
	keep := func(body string) string { return strings.TrimFunc(body, pythonSpace) }
	f.Fuzz(func(t *testing.T, source string) {
		if p, err := compile("fuzz", source); err == nil && p == nil {
			t.Fatal("neither a program nor an error")
		}
		once, err := resolveWhitespace(source, keep)
		if err != nil || strings.Contains(once, "macro") || len(once) >= maxSource {
			return
		}
		// The end that is dropped once must not be dropped again.
		twice, err := resolveWhitespace(once+"\n", keep)
		if err != nil || twice != once {
			t.Errorf("%q became %q and then %q, %v", source, once, twice, err)
		}
	})
}

// FuzzSameWithoutAdjacentTags checks the preparation against the engine's own
// whitespace control where that is right: where there is text between the tags.
func FuzzSameWithoutAdjacentTags(f *testing.F) {
	f.Add(" x\n", "\n y ", "z", byte(0))
	f.Add("x\n \t", "\n\ny\n", " z\n ", byte(0x1b))
	f.Fuzz(func(t *testing.T, a, b, c string, markers byte) {
		for _, s := range []string{a, b, c} {
			// What only Jinja2 knows: other line ends and spaces than ASCII's.
			if strings.ContainsAny(s, "{}\r\v\f\x1c\x1d\x1e\x1f\u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000") || strings.ContainsFunc(s, func(c rune) bool { return c >= 0x2000 && c <= 0x200a }) {
				return
			}
			if strings.TrimSpace(s) == "" {
				return
			}
		}
		mark := func(bit int, sign string) string {
			if markers>>bit&1 == 1 {
				return sign
			}
			return ""
		}
		source := a + "{%" + mark(0, "-") + " if true " + mark(1, "-") + "%}" + b + "{{" + mark(2, "-") + " 'v' " + mark(3, "-") + "}}" + c +
			"{%" + mark(4, "+") + " endif " + mark(5, "+") + "%}.{#" + mark(6, "-") + " # " + mark(7, "-") + "#}" + a + "."
		engine, err := jinja.Compile(source)
		if err != nil {
			t.Fatal(err)
		}
		want, err := engine.RenderValues(nil)
		if err != nil {
			t.Fatal(err)
		}
		template, err := New(source, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := template.Render(Options{}); err != nil || got != want {
			t.Errorf("%q: got %q, %v; the engine gives %q", source, got, err, want)
		}
	})
}

// FuzzMessage checks that a message reaches a template just as it was read.
func FuzzMessage(f *testing.F) {
	for _, s := range []string{
		`{"role":"user","content":"a"}`,
		`{"content":null,"role":"assistant","tool_calls":[{"id":"1","function":{"arguments":"{}","name":"f"}}],"x":[1.50,{}]}`,
		`{"tool_calls":[],"role":"","name":null,"content":[{"type":"text"}],"role":"b"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m Message
		if json.Unmarshal(raw, &m) != nil {
			return
		}
		want, err := decodeValue(raw)
		if err != nil {
			t.Fatalf("%s: decoded as a message, but: %v", raw, err)
		}
		got, err := m.value()
		if err != nil || got.String() != want.String() {
			t.Errorf("%s: got %s, %v; want %s", raw, got, err, want)
		}
	})
}

package tokenize

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestTranslateRegex(t *testing.T) {
	for _, same := range []string{
		gpt2Pattern,
		`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
		"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
		`(a|b)*?c+?d??.(?=e)(?!f)(?<=g)(?<!h)(?>i)j{2,}k{2,3}?l{3}[ -~]\d\D\P{Han}\ \-]}`,
	} {
		if got, err := translateRegex("x", same); err != nil || got != same {
			t.Errorf("%q became %q, %v", same, got, err)
		}
	}
	for in, want := range map[string]string{
		`[\p{Lu}\p{L}&&[^\p{Han}]]+x`: `[\p{Lu}\p{L}-[\p{Han}]]+x`,
		`\u4e00[\x{4E01}-\x{1F600}]`:  "一[丁-😀]",
		`\x41\u002e\x{5d}`:            `\x41\x2e\x5d`,
	} {
		if got, err := translateRegex("x", in); err != nil || got != want {
			t.Errorf("%q became %q, %v, want %q", in, got, err, want)
		}
	}
}

func TestRefusedRegex(t *testing.T) {
	for _, p := range []string{
		`a++`, `a*+`, `a?+`, `a{2}+`, `a{2}?`, `a{,3}`, `a{x}`, `a{`, `a{1,2}*`, `a{99999}`,
		`^a`, `a$`, `\w`, `\W`, `\b`, `\B`, `\A`, `\z`, `\h`, `\R`, `\X`, `\K`, `\G`, `\1`, `\k<n>`, `\`, `\é`,
		`\p{^L}`, `\p{Alpha}`, `\pL`, `\p{L`, `\p{LC}`, `\p`, `\x80`, `\x4`, `\xzz`, `\x{110000}`, `\x{41`, `\x{}`, `\u12`, `\ud800`, `\u{41}`,
		`(?m:a)`, `(?i)a`, `(?x)a b`, `(?<n>a)`, `(?#c)`, `(?-i:a)`, `(?i:ss)`, `(?i:é)`, `(?i:[a])`, `(?i:a`, `(?i:a|fi)`,
		`[[:alpha:]]`, `[a[bc]]`, `[]a]`, `[^]a]`, `[a`, `[a&&b]`, `[^a&&[^b]]`, `[a&&[b]]`, `[&&[^a]]`, `[a&&[^b]c]`, `[a&&[^b`, `[a&&[^[b]]]`, `[a&&[^^b]]`, `[\w]`,
	} {
		_, err := translateRegex("x", p)
		var unsupported *UnsupportedError
		if !errors.As(err, &unsupported) || unsupported.Value != p {
			t.Errorf("%q: %v, want an UnsupportedError with the pattern", p, err)
		}
	}
}

func TestSpans(t *testing.T) {
	for _, c := range []struct{ regex, text, want string }{
		{`\s+`, "ab  c ", "ab|[  ]|c|[ ]"},
		{`x`, "ab", "ab"},
		{`(?=b)`, "abcb", "a|[]|bc|[]|b"},
		{`b*`, "abba", "[]|a|[bb]|a|[]"},
		{`é|🙂`, "aé🙂b", "a|[é]|[🙂]|b"},
	} {
		p, err := compileRegex("x", c.regex, defaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		spans, err := p.spans(c.text, newWork())
		if err != nil {
			t.Fatal(err)
		}
		var parts []string
		for _, s := range spans {
			part := c.text[s.start:s.end]
			if s.match {
				part = "[" + part + "]"
			}
			parts = append(parts, part)
		}
		if got := strings.Join(parts, "|"); got != c.want {
			t.Errorf("%s on %q: %s, want %s", c.regex, c.text, got, c.want)
		}
	}
}

// TestTooSlow has a pattern that tries an exponential number of ways.
func TestTooSlow(t *testing.T) {
	split := `{"type":"Split","pattern":{"Regex":"(?:a|aa)+b"},"behavior":"Isolated","invert":false}`
	l := defaultLimits()
	l.search = time.Millisecond
	for name, data := range map[string][]byte{
		"pre-tokenizer": tinyFile("[]", "null", split, "null"),
		"normalizer":    tinyFile("[]", `{"type":"Replace","pattern":{"Regex":"(?:a|aa)+b"},"content":"c"}`, "null", "null"),
	} {
		tok, err := newTokenizer(data, l)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tok.Encode(strings.Repeat("a", 200), false); !errors.Is(err, ErrTooSlow) {
			t.Errorf("%s: %v, want ErrTooSlow", name, err)
		}
		patient, err := New(data)
		if err != nil {
			t.Fatal(err)
		}
		if ids, err := patient.Encode("aab", false); err != nil || len(ids) == 0 {
			t.Errorf("%s on a short text: %v, %v", name, ids, err)
		}
	}
}

// TestTextBudget has a clock on which each look takes a second.
func TestTextBudget(t *testing.T) {
	now := time.Unix(0, 0)
	l := limits{
		now:    func() time.Time { now = now.Add(time.Second); return now },
		search: time.Minute,
		text:   100 * time.Second,
	}
	split := `{"type":"Split","pattern":{"Regex":"a"},"behavior":"Isolated","invert":false}`
	tok, err := newTokenizer(tinyFile("[]", "null", split, "null"), l)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tok.Encode(strings.Repeat("ab", 50), false); err != nil {
		t.Errorf("50 matches: %v", err)
	}
	if _, err := tok.Encode(strings.Repeat("ab", 200), false); !errors.Is(err, ErrTooSlow) {
		t.Errorf("200 matches: %v, want ErrTooSlow", err)
	}
}

// TestLongRuns: the patterns of real tokenizers take long runs of one kind of character in stride.
func TestLongRuns(t *testing.T) {
	tok := load(t, "byte_level.json")
	for _, unit := range []string{"a", " ", "\n", "1", "!", "你", " \n", "é", "'s", "🙂", "aA"} {
		text := strings.Repeat(unit, 200_000/len(unit))
		ids, err := tok.Encode(text, false)
		if err != nil {
			t.Errorf("%q repeated: %v", unit, err)
		} else if got := tok.Decode(ids, false); got != text {
			t.Errorf("%q repeated does not come back", unit)
		}
	}
}

func TestBehaviors(t *testing.T) {
	for _, c := range []struct {
		behavior behavior
		want     []string
	}{
		{isolated, []string{"--", "a", "-", "b", "-", "-", "c", "-"}},
		{removed, []string{"a", "b", "c"}},
		{contiguous, []string{"--", "a", "-", "b", "--", "c", "-"}},
		{mergedWithPrevious, []string{"--", "a-", "b-", "-", "c-"}},
		{mergedWithNext, []string{"--a", "-b", "-", "-c", "-"}},
	} {
		text := "--a-b--c-"
		spans := []span{{0, 2, true}, {2, 3, false}, {3, 4, true}, {4, 5, false}, {5, 6, true}, {6, 7, true}, {7, 8, false}, {8, 9, true}}
		var got []string
		for _, s := range c.behavior.apply(spans) {
			got = append(got, text[s.start:s.end])
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.behavior, got, c.want)
		}
	}
}

func TestPreTokenizers(t *testing.T) {
	metaspace := func(scheme string, split bool) string {
		return fmt.Sprintf(`{"type":"Metaspace","replacement":"▁","prepend_scheme":%q,"split":%v}`, scheme, split)
	}
	added := `[{"id":8,"content":"<x>"}]`
	for _, c := range []struct{ pre, text, want string }{
		{"null", "a b", "a b"},
		{`{"type":"Digits","individual_digits":true}`, "ab12½c", "ab|1|2|½|c"},
		{`{"type":"Digits","individual_digits":false}`, "ab12½c", "ab|12½|c"},
		{metaspace("always", true), "a b<x>c", "▁a|▁b|<x>|▁c"},
		{metaspace("first", true), "a b<x>c", "▁a|▁b|<x>|c"},
		{metaspace("first", true), "<x>a b", "<x>|a|▁b"},
		{metaspace("first", true), " a  b", "▁a|▁|▁b"},
		{metaspace("never", true), "a b<x>c", "a|▁b|<x>|c"},
		{metaspace("always", false), "a b c", "▁a▁b▁c"},
		{`{"type":"ByteLevel","add_prefix_space":true,"use_regex":true}`, "it's é<x> a", "Ġit|'s|ĠÃ©|<x>|Ġa"},
		{`{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}`, "it's é", "it'sĠÃ©"},
		{`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"String":"b"},"behavior":"Isolated","invert":true},` + metaspace("first", true) + `]}`, "abc", "▁a|b|c"},
	} {
		tok := loadTiny(t, added, "null", c.pre, "null")
		pieces, err := tok.split(c.text, newWork())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range pieces {
			got = append(got, p.text)
		}
		if s := strings.Join(got, "|"); s != c.want {
			t.Errorf("%s on %q: %s, want %s", c.pre, c.text, s, c.want)
		}
	}
}

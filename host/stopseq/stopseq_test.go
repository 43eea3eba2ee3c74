package stopseq

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"
)

// naive is the definition: the first position where a stop string is complete, and of those the longest.
func naive(stops []string, text string) (emit, matched string, done bool) {
	for end := 1; end <= len(text); end++ {
		for _, s := range stops {
			if strings.HasSuffix(text[:end], s) && len(s) > len(matched) {
				matched = s
			}
		}
		if matched != "" {
			return text[:end-len(matched)], matched, true
		}
	}
	return text, "", false
}

// mustHold is how much of the end of text may become a stop string.
func mustHold(stops []string, text string) int {
	longest := 0
	for _, s := range stops {
		for n := 1; n < len(s) && n <= len(text); n++ {
			if strings.HasSuffix(text, s[:n]) {
				longest = max(longest, n)
			}
		}
	}
	return longest
}

func check(t *testing.T, stops, pieces []string) {
	t.Helper()
	m, err := New(stops...)
	if err != nil {
		t.Fatal(err)
	}
	var text, got strings.Builder
	var found string
	stopped := false
	for _, p := range pieces {
		text.WriteString(p)
		emit, matched, done := m.Push(p)
		got.WriteString(emit)
		wantEmit, wantMatched, wantDone := naive(stops, text.String())
		if !wantDone {
			wantEmit = text.String()[:text.Len()-mustHold(stops, text.String())]
		}
		if got.String() != wantEmit || matched != wantMatched || done != wantDone {
			t.Fatalf("stops %q, pieces %q, at %q: emitted %q, matched %q, done %v, want %q, %q, %v",
				stops, pieces, text.String(), got.String(), matched, done, wantEmit, wantMatched, wantDone)
		}
		found, stopped = matched, done
	}
	got.WriteString(m.Flush())
	wantEmit, wantMatched, wantDone := naive(stops, text.String())
	if got.String() != wantEmit || found != wantMatched || stopped != wantDone {
		t.Fatalf("stops %q, pieces %q: all emitted %q, want %q", stops, pieces, got.String(), wantEmit)
	}
}

func TestMatcher(t *testing.T) {
	for _, c := range []struct {
		stops, pieces []string
	}{
		{nil, []string{"abc", "", "d"}},
		{[]string{"stop"}, []string{"do not s", "t", "op", " here"}},
		{[]string{"stop"}, []string{"ststop"}},
		{[]string{"aab"}, []string{"aa", "a", "b"}},
		{[]string{"abab"}, []string{"aba", "bab"}},
		{[]string{"abcd", "bc"}, []string{"a", "b", "c", "d"}},
		{[]string{"bc", "abc", "c"}, []string{"xabc"}},
		{[]string{"\n\n", "\nUser:"}, []string{"hi\n", "Us", "er", "!\n", "\n"}},
		{[]string{"你好"}, []string{"你", "们你", "好"}},
		{[]string{"x"}, []string{"abcx", "more", "x"}},
		{[]string{"same", "same"}, []string{"the same"}},
	} {
		check(t, c.stops, c.pieces)
	}
}

func TestEmptyStop(t *testing.T) {
	if _, err := New("a", ""); !errors.Is(err, ErrEmpty) {
		t.Errorf("got %v, want ErrEmpty", err)
	}
}

// TestHoldsBackWholeCharacters: pieces of whole characters come out as whole characters.
func TestHoldsBackWholeCharacters(t *testing.T) {
	m, err := New("…你", "é!")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"…", "…", "è", "é", "é", "你…", "…好"} {
		if emit, _, _ := m.Push(p); !utf8.ValidString(emit) {
			t.Errorf("Push(%q) = %q", p, emit)
		}
	}
}

func TestReuseAfterFlush(t *testing.T) {
	m, err := New("ab")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if emit, matched, done := m.Push("xab"); emit != "x" || matched != "ab" || !done {
			t.Errorf("got %q, %q, %v", emit, matched, done)
		}
		if got := m.Flush(); got != "" {
			t.Errorf("Flush() = %q after a match", got)
		}
		if emit, _, done := m.Push("ya"); emit != "y" || done {
			t.Errorf("got %q, %v", emit, done)
		}
		if got := m.Flush(); got != "a" {
			t.Errorf("Flush() = %q, want a", got)
		}
	}
}

func TestRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	word := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteByte("aab"[rng.IntN(3)])
		}
		return b.String()
	}
	for range 20_000 {
		var stops, pieces []string
		for range 1 + rng.IntN(3) {
			stops = append(stops, word(1+rng.IntN(6)))
		}
		for range rng.IntN(8) {
			pieces = append(pieces, word(rng.IntN(5)))
		}
		check(t, stops, pieces)
	}
}

func FuzzMatcher(f *testing.F) {
	f.Fuzz(func(t *testing.T, stops, text string, seed uint64) {
		var list []string
		for s := range strings.SplitSeq(stops, "|") {
			if s != "" {
				list = append(list, s)
			}
		}
		rng := rand.New(rand.NewPCG(seed, 0))
		var pieces []string
		for rest := text; rest != ""; {
			n := 1 + rng.IntN(min(len(rest), 8))
			pieces = append(pieces, rest[:n])
			rest = rest[n:]
		}
		check(t, list, pieces)
	})
}

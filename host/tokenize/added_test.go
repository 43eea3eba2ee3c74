package tokenize

import (
	"slices"
	"testing"
)

func TestAddedTokens(t *testing.T) {
	const lower = `{"type":"Replace","pattern":{"String":"X"},"content":"x"}`
	for _, c := range []struct {
		added, text string
		want        []int32
	}{
		{`{"content":"<x>"}`, "a<x>b<x", []int32{0, 8, 1}},
		{`{"content":"<x>"}`, "a<X>b", []int32{5}}, // not normalized: only as written
		{`{"content":"<X>","normalized":true}`, "<x><X>a", []int32{8, 8, 0}},
		{`{"content":"aab","single_word":true}`, "aab aaba caab", []int32{8, 4, 0, 5, 0, 4, 2, 0, 5}},
		{`{"content":"aab","single_word":true}`, "²aab", []int32{8}}, // ² is no word character
		{`{"content":"aab","single_word":true}`, "_aab", []int32{0, 5}},
		{`{"content":"<l>","lstrip":true}`, "a \n<l> b", []int32{0, 8, 4, 1}},
		{`{"content":"<r>","rstrip":true}`, "a <r> \n b", []int32{0, 4, 8, 1}},
		{`{"content":"<lr>","lstrip":true,"rstrip":true}`, "a <lr> <lr> b", []int32{0, 8, 8, 1}},
	} {
		tok := loadTiny(t, `[{"id":8,`+c.added[1:]+`]`, lower, "null", "null")
		if got, err := tok.Encode(c.text, false); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s in %q: %v, %v, want %v", c.added, c.text, got, err, c.want)
		}
	}
}

func TestLongestAddedTokenWins(t *testing.T) {
	tok := loadTiny(t, `[{"id":8,"content":"<a"},{"id":9,"content":"<a>>"},{"id":10,"content":">"}]`, "null", "null", "null")
	want := []int32{8, 10, 0, 9, 8}
	if got, err := tok.Encode("<a>a<a>><a", false); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

// TestSkippedTokens: as in the reference, a special token that decodes to its normalized spelling is not skipped, since
// that spelling is not among the special ones.
func TestSkippedTokens(t *testing.T) {
	added := `[{"id":8,"content":"<s>","special":true},{"id":9,"content":"<t>"},{"id":10,"content":"<X>","special":true,"normalized":true}]`
	tok := loadTiny(t, added, `{"type":"Replace","pattern":{"String":"X"},"content":"x"}`, "null", `{"type":"Fuse"}`)
	ids := []int32{0, 8, 9, 10}
	if got, want := tok.Decode(ids, true), "a<t><x>"; got != want {
		t.Errorf("skipping: %q, want %q", got, want)
	}
	if got, want := tok.Decode(ids, false), "a<s><t><x>"; got != want {
		t.Errorf("keeping: %q, want %q", got, want)
	}
	if !tok.IsSpecial(10) || tok.Token(10) != "<X>" {
		t.Error("<X> is not special, or not spelled as in the file")
	}
}

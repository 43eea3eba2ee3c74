package tokenize

import (
	"math/rand/v2"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"
)

// TestManyMarks: more than 30 marks in a row are put in order and nothing is inserted.
func TestManyMarks(t *testing.T) {
	acute, dotBelow := strings.Repeat("\u0301", 40), strings.Repeat("\u0323", 40)
	for _, c := range []struct {
		form     norm.Form
		in, want string
	}{
		{norm.NFC, "e" + acute + dotBelow + "x", "ẹ" + strings.Repeat("\u0323", 39) + acute + "x"},
		{norm.NFD, "é" + acute + dotBelow, "e" + dotBelow + "\u0301" + acute},
		{norm.NFKC, "ﬁ" + acute + "가", "fí" + strings.Repeat("\u0301", 39) + "가"},
		{norm.NFKD, "½" + acute + "가", "1⁄2" + acute + "\u1100\u1161"},
		{norm.NFC, strings.Repeat("\u0344", 40), strings.Repeat("\u0308\u0301", 40)},
		{norm.NFC, acute, acute},
	} {
		if got := normalizeUnicode(c.form, c.in); got != c.want {
			t.Errorf("form %v of %+q: %+q, want %+q", c.form, c.in, got, c.want)
		}
	}
}

// TestNormalizeExact compares the textbook algorithm with golang.org/x/text where both apply.
func TestNormalizeExact(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 20_000 {
		runes := make([]rune, rng.IntN(8))
		for i := range runes {
			block := [][2]int{{0x41, 0x7A}, {0xC0, 0x36F}, {0x900, 0xDFF}, {0x1100, 0x11FF}, {0x1E00, 0x1FFF}, {0x2F00, 0x33FF}, {0xAC00, 0xAD00}, {0xF900, 0xFFEF}, {0x11000, 0x11FFF}, {0x1D100, 0x1D200}}[rng.IntN(10)]
			runes[i] = rune(block[0] + rng.IntN(block[1]-block[0]+1))
		}
		s := string(runes)
		for _, form := range []norm.Form{norm.NFC, norm.NFD, norm.NFKC, norm.NFKD} {
			if got, want := normalizeExact(form, s), form.String(s); got != want {
				t.Fatalf("form %v of %+q: %+q, want %+q", form, s, got, want)
			}
		}
	}
}

func TestNormalizers(t *testing.T) {
	for _, c := range []struct{ normalizer, in, want string }{
		{`{"type":"Prepend","prepend":"▁"}`, "ab", "▁ab"},
		{`{"type":"Prepend","prepend":"▁"}`, "", ""},
		{`{"type":"Replace","pattern":{"String":"a"},"content":"bb"}`, "aca", "bbcbb"},
		{`{"type":"Replace","pattern":{"Regex":"\\s+"},"content":"$0"}`, "a  b ", "a$0b$0"},
		{`{"type":"Replace","pattern":{"Regex":"\\s+"},"content":"x"}`, "", ""},
		{`{"type":"ByteLevel"}`, "a é", "aĠÃ©"},
		{`{"type":"NFC"}`, "e\u0301", "é"},
		{`{"type":"Sequence","normalizers":[{"type":"NFKD"},{"type":"Prepend","prepend":"x"}]}`, "ﬁ", "xfi"},
	} {
		tok := loadTiny(t, "[]", c.normalizer, "null", "null")
		if got, err := tok.normalize(c.in, newWork()); err != nil || got != c.want {
			t.Errorf("%s of %q: %q, %v, want %q", c.normalizer, c.in, got, err, c.want)
		}
	}
}

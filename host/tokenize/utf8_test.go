package tokenize

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestLossy has what Python's bytes.decode("utf-8", "replace") gives.
func TestLossy(t *testing.T) {
	for _, c := range []struct {
		in     string
		want   string
		offset int // of the first bad byte; -1 if there is none
	}{
		{"", "", -1},
		{"aé你🙂\uFFFD", "aé你🙂\uFFFD", -1},
		{"\xff", "\uFFFD", 0},
		{"a\x80b", "a\uFFFDb", 1},
		{"é\xc3(", "é\uFFFD(", 2},
		{"\xe2\x82", "\uFFFD", 0},
		{"\xe2\x82x", "\uFFFDx", 0},
		{"\xe2\x28\xa1", "\uFFFD(\uFFFD", 0},
		{"ok\xf0\x9f\x98", "ok\uFFFD", 2},
		{"\xf0\x9f\x98\xf0\x9f\x98\x80", "\uFFFD😀", 0},
		{"\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD", 0},
		{"\xc0\x80", "\uFFFD\uFFFD", 0},
		{"\xe0\x9f\xbf", "\uFFFD\uFFFD\uFFFD", 0},
		{"\xf4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD", 0},
		{"\xf8\x88\x80", "\uFFFD\uFFFD\uFFFD", 0},
	} {
		if got := lossy(c.in); got != c.want {
			t.Errorf("lossy(%q) = %q, want %q", c.in, got, c.want)
		}
		err := ValidateUTF8(c.in)
		var invalid *InvalidUTF8Error
		switch {
		case c.offset < 0 && err != nil:
			t.Errorf("ValidateUTF8(%q) = %v", c.in, err)
		case c.offset >= 0 && (!errors.As(err, &invalid) || invalid.Offset != c.offset):
			t.Errorf("ValidateUTF8(%q) = %v, want offset %d", c.in, err, c.offset)
		}
	}
}

// FuzzLossy checks that text is made valid, that valid text stays, and that cutting it anywhere changes nothing.
func FuzzLossy(f *testing.F) {
	f.Fuzz(func(t *testing.T, s string, cut uint) {
		whole := lossy(s)
		if !utf8.ValidString(whole) {
			t.Errorf("lossy(%q) = %q is not valid", s, whole)
		}
		if valid := ValidateUTF8(s) == nil; valid != utf8.ValidString(s) || valid && whole != s {
			t.Errorf("%q: valid %v, lossy %q", s, valid, whole)
		}
		at := int(cut % uint(len(s)+1))
		first, rest := lossyPrefix(s[:at])
		if len(rest) >= utf8.UTFMax {
			t.Errorf("lossyPrefix(%q) holds %q back", s[:at], rest)
		}
		if got := first + lossy(rest+s[at:]); got != whole {
			t.Errorf("%q cut at %d: %q, whole %q", s, at, got, whole)
		}
		if strings.ContainsRune(first, utf8.RuneError) && !strings.ContainsRune(whole, utf8.RuneError) {
			t.Errorf("%q cut at %d has a replacement in %q", s, at, first)
		}
	})
}

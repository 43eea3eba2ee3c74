package tokenize

import (
	"strings"
	"unicode/utf8"
)

const replacement = "\uFFFD"

// sequence classifies the bytes at the front of a string.
type sequence int

const (
	whole      sequence = iota // a character
	broken                     // a maximal subpart that can never become a character
	unfinished                 // the beginning of a character, cut off by the end of the string
)

// firstSequence returns the length and class of what s, which is not empty, begins with. A broken sequence is a maximal
// subpart of an ill-formed one (Unicode standard, section 3.9, table 3-8): decoders replace it by one U+FFFD.
func firstSequence(s string) (int, sequence) {
	if s[0] < utf8.RuneSelf {
		return 1, whole
	}
	if r, n := utf8.DecodeRuneInString(s); r != utf8.RuneError || n > 1 {
		return n, whole
	}
	need, low, high := continuation(s[0])
	if need == 0 {
		return 1, broken
	}
	n := 1
	for ; n <= need; n++ {
		if n == len(s) {
			return n, unfinished
		}
		if s[n] < low || s[n] > high {
			break
		}
		low, high = 0x80, 0xBF
	}
	return n, broken
}

// continuation returns how many bytes must follow lead and the range of the first of them.
func continuation(lead byte) (need int, low, high byte) {
	switch {
	case lead >= 0xC2 && lead <= 0xDF:
		return 1, 0x80, 0xBF
	case lead == 0xE0:
		return 2, 0xA0, 0xBF
	case lead == 0xED:
		return 2, 0x80, 0x9F
	case lead >= 0xE1 && lead <= 0xEF:
		return 2, 0x80, 0xBF
	case lead == 0xF0:
		return 3, 0x90, 0xBF
	case lead >= 0xF1 && lead <= 0xF3:
		return 3, 0x80, 0xBF
	case lead == 0xF4:
		return 3, 0x80, 0x8F
	}
	return 0, 0, 0
}

// lossy returns s with one U+FFFD for each maximal ill-formed subpart, as Rust's from_utf8_lossy and Python's
// errors="replace" do. (Go's range gives one a byte, strings.ToValidUTF8 one a run.)
func lossy(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	text, rest := lossyPrefix(s)
	if rest != "" {
		text += replacement
	}
	return text
}

// lossyPrefix is lossy for a string that may go on: rest is the unfinished sequence at its end, which more bytes decide.
func lossyPrefix(s string) (text, rest string) {
	var b strings.Builder
	b.Grow(len(s))
	for len(s) > 0 {
		n, class := firstSequence(s)
		switch class {
		case whole:
			b.WriteString(s[:n])
		case broken:
			b.WriteString(replacement)
		case unfinished:
			return b.String(), s
		}
		s = s[n:]
	}
	return b.String(), ""
}

// ValidateUTF8 returns an *InvalidUTF8Error if text is not UTF-8. Encode takes such text as the reference does, with
// U+FFFD in the bad places; callers that would rather refuse it ask here first.
func ValidateUTF8(text string) error {
	if utf8.ValidString(text) {
		return nil
	}
	at := 0
	for {
		n, class := firstSequence(text[at:])
		if class != whole {
			return &InvalidUTF8Error{Offset: at}
		}
		at += n
	}
}

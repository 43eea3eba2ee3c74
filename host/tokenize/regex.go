package tokenize

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// translateRegex rewrites a pattern from Oniguruma's Ruby syntax, which tokenizer.json uses, to .NET's, which regexp2
// reads. It lets through only what means the same in both (or can be said in both) and refuses the rest: the two
// languages give many spellings, such as possessive quantifiers, nested classes, \w and ^, different meanings.
func translateRegex(component, pattern string) (string, error) {
	t := &regexTranslator{component: component, pattern: pattern}
	for t.pos < len(pattern) {
		if err := t.next(); err != nil {
			return "", err
		}
	}
	return t.out.String(), nil
}

type regexTranslator struct {
	component, pattern string
	pos                int
	out                strings.Builder
	quantified         bool // what was just read is a quantifier
}

func (t *regexTranslator) rest() string { return t.pattern[t.pos:] }

func (t *regexTranslator) copy(n int) {
	t.out.WriteString(t.pattern[t.pos : t.pos+n])
	t.pos += n
}

func (t *regexTranslator) refuse(construct string) error {
	return &UnsupportedError{Component: t.component, Value: t.pattern, Want: "a pattern without " + construct}
}

func (t *regexTranslator) next() error {
	c := t.pattern[t.pos]
	if strings.IndexByte("*+?{", c) >= 0 {
		return t.quantifier()
	}
	t.quantified = false
	switch c {
	case '\\':
		return t.escape()
	case '[':
		return t.class()
	case '(':
		return t.group()
	case '^', '$':
		return t.refuse("the anchor " + string(c))
	}
	_, n := utf8.DecodeRuneInString(t.rest())
	t.copy(n)
	return nil
}

func (t *regexTranslator) quantifier() error {
	if t.quantified {
		return t.refuse("a quantifier on a quantifier")
	}
	n, exact := 1, false
	if t.pattern[t.pos] == '{' {
		body, _, ok := strings.Cut(t.rest()[1:], "}")
		low, high, isRange := strings.Cut(body, ",")
		if !ok || !isNumber(low) || isRange && high != "" && !isNumber(high) {
			return t.refuse("a brace that is no {n}, {n,} or {n,m}")
		}
		n, exact = len(body)+2, !isRange
	}
	t.copy(n)
	if strings.HasPrefix(t.rest(), "?") {
		if exact {
			return t.refuse("{n}?")
		}
		t.copy(1)
	}
	t.quantified = true
	return nil
}

func isNumber(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= 0 && n <= 1000 && s[0] != '+'
}

func (t *regexTranslator) group() error {
	for _, open := range []string{"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"} {
		if strings.HasPrefix(t.rest(), open) {
			t.copy(len(open))
			return nil
		}
	}
	if strings.HasPrefix(t.rest(), "(?i:") {
		return t.foldedGroup()
	}
	if strings.HasPrefix(t.rest(), "(?") {
		return t.refuse("the group " + t.rest()[:min(4, len(t.rest()))])
	}
	t.copy(1)
	return nil
}

// foldedGroup reads (?i:...) of plain ASCII. Oniguruma also folds one character to several, such as U+FB06 to "st",
// and .NET never does, so a text where that could happen is refused.
func (t *regexTranslator) foldedGroup() error {
	body, _, ok := strings.Cut(t.rest()[len("(?i:"):], ")")
	if !ok {
		return t.refuse("an open group")
	}
	for i := range len(body) {
		c := body[i] | 0x20
		if letter := c >= 'a' && c <= 'z'; !letter && strings.IndexByte("'| -", body[i]) < 0 {
			return t.refuse("(?i:) around anything but ASCII letters, ', - and |")
		}
	}
	for _, several := range []string{"ss", "st", "ff", "fi", "fl"} {
		if strings.Contains(strings.ToLower(body), several) {
			return t.refuse("(?i:) around " + several)
		}
	}
	t.copy(len("(?i:") + len(body) + 1)
	return nil
}

// escape reads a backslash and what belongs to it, inside a class or outside.
func (t *regexTranslator) escape() error {
	rest := t.rest()
	if len(rest) < 2 {
		return t.refuse("a backslash at the end")
	}
	switch c := rest[1]; {
	case strings.IndexByte("sSdDrntfv", c) >= 0:
		t.copy(2)
	case c == 'p' || c == 'P':
		name, _, ok := strings.Cut(strings.TrimPrefix(rest[2:], "{"), "}")
		if !ok || rest[2] != '{' || !isProperty(name) {
			return t.refuse("the property " + name)
		}
		t.copy(len(`\p{}`) + len(name))
	case c == 'u' || c == 'x':
		return t.hexEscape()
	case c < utf8.RuneSelf && (unicode.IsPunct(rune(c)) || unicode.IsSymbol(rune(c)) || c == ' '):
		t.copy(2)
	default:
		return t.refuse(`the escape \` + string(c))
	}
	return nil
}

func isProperty(name string) bool {
	_, category := unicode.Categories[name]
	_, script := unicode.Scripts[name]
	return (category || script) && name != "LC"
}

// hexEscape reads \uHHHH, \xHH below 0x80 (above, Oniguruma means a byte) and \x{H...}.
func (t *regexTranslator) hexEscape() error {
	digits, n, top := "", 0, uint64(unicode.MaxRune)
	switch rest := t.rest(); {
	case strings.HasPrefix(rest, `\x{`):
		var ok bool
		digits, _, ok = strings.Cut(rest[3:], "}")
		if !ok {
			return t.refuse("an open brace")
		}
		n = len(digits) + len(`\x{}`)
	case rest[1] == 'u' && len(rest) >= 6:
		digits, n = rest[2:6], 6
	case rest[1] == 'x' && len(rest) >= 4:
		digits, n, top = rest[2:4], 4, utf8.RuneSelf-1
	}
	code, err := strconv.ParseUint(digits, 16, 32)
	if err != nil || code > top || !utf8.ValidRune(rune(code)) || digits[0] == '+' {
		return t.refuse("an escape that is no \\uHHHH, \\x{H...} or ASCII \\xHH")
	}
	t.pos += n
	if code < utf8.RuneSelf {
		t.out.WriteString(`\x`)
		t.out.WriteByte("0123456789abcdef"[code>>4])
		t.out.WriteByte("0123456789abcdef"[code&15])
	} else {
		t.out.WriteRune(rune(code))
	}
	return nil
}

// class reads [...]. The intersection [x&&[^y]], which some tokenizers use, becomes .NET's subtraction [x-[y]].
func (t *regexTranslator) class() error {
	t.copy(1)
	negated := strings.HasPrefix(t.rest(), "^")
	if negated {
		t.copy(1)
	}
	for empty := true; t.pos < len(t.pattern); empty = false {
		switch rest := t.rest(); {
		case rest[0] == ']' && empty:
			return t.refuse("a class that begins with ]")
		case rest[0] == ']':
			t.copy(1)
			return nil
		case strings.HasPrefix(rest, "&&[^") && !negated && !empty:
			return t.subtraction()
		case strings.HasPrefix(rest, "&&"):
			return t.refuse("an intersection that is no [x&&[^y]]")
		case rest[0] == '[':
			return t.refuse("a class inside a class")
		case rest[0] == '\\':
			if err := t.escape(); err != nil {
				return err
			}
		default:
			_, n := utf8.DecodeRuneInString(rest)
			t.copy(n)
		}
	}
	return t.refuse("an open class")
}

func (t *regexTranslator) subtraction() error {
	t.pos += len("&&[^")
	if strings.HasPrefix(t.rest(), "^") {
		return t.refuse("an intersection that is no [x&&[^y]]")
	}
	t.out.WriteString("-")
	inner := &regexTranslator{component: t.component, pattern: "[" + t.rest()}
	if err := inner.class(); err != nil {
		return t.refuse("an intersection that is no [x&&[^y]]")
	}
	t.out.WriteString(inner.out.String())
	t.pos += inner.pos - 1
	if !strings.HasPrefix(t.rest(), "]") {
		return t.refuse("an intersection that is no [x&&[^y]]")
	}
	t.copy(1)
	return nil
}

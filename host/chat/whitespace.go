package chat

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// Bounds on a template's source. Real templates stay under 50 kB and under a
// dozen brackets deep; the engine's parser recurses once per bracket.
const (
	maxSource   = 256 << 10
	maxBrackets = 100
)

// Names of the callables that count a macro's depth; see engine.go.
const (
	enterMacro = "__macro_enter"
	leaveMacro = "__macro_leave"
)

// resolveWhitespace rewrites a template so that all of Jinja's whitespace
// control is already done: line ends are "\n", the last one is dropped, "-"
// and "+" markers, trim_blocks and lstrip_blocks have taken their effect on the
// text, comments are gone, and the tags left carry only markers that change
// nothing. It follows the order of Jinja2's own lexer (jinja2/lexer.py,
// Lexer.tokeniter), where a marker touches only the text right beside its tag.
// The body of each tag passes through the function given. Each macro's body is
// wrapped in calls that count its depth.
func resolveWhitespace(source string, tag func(string) string) (string, error) {
	if len(source) > maxSource {
		return "", &LimitError{What: "bytes of template", Limit: maxSource}
	}
	source = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(source)
	r := rewriter{src: strings.TrimSuffix(source, "\n"), lineStart: true, tag: tag}
	for r.pos < len(r.src) {
		if err := r.next(); err != nil {
			return "", err
		}
	}
	return r.out.String(), nil
}

type rewriter struct {
	src       string
	pos       int
	lineStart bool                // what was read last ended a line
	tag       func(string) string // rewrites the body of a tag
	out       strings.Builder
}

// next copies the text up to the next tag, and that tag.
func (r *rewriter) next() error {
	open := nextTag(r.src[r.pos:])
	if open < 0 {
		r.out.WriteString(r.src[r.pos:])
		r.pos = len(r.src)
		return nil
	}
	text := r.src[r.pos : r.pos+open]
	kind := r.src[r.pos+open+1]
	r.pos += open + 2
	r.text(r.before(text, r.sign(), kind))

	switch {
	case kind == '#':
		return r.comment()
	case kind == '{':
		return r.expression()
	case word(r.src[r.pos:]) == "raw":
		return r.raw()
	}
	return r.statement()
}

// nextTag is where the first tag opens in s, or -1.
func nextTag(s string) int {
	for i := 0; ; i++ {
		j := strings.IndexByte(s[i:], '{')
		if j < 0 || i+j+1 >= len(s) {
			return -1
		}
		i += j
		if c := s[i+1]; c == '{' || c == '%' || c == '#' {
			return i
		}
	}
}

// sign takes the marker that follows an opener, 0 if there is none.
func (r *rewriter) sign() byte {
	if r.pos < len(r.src) && (r.src[r.pos] == '-' || r.src[r.pos] == '+') {
		r.pos++
		return r.src[r.pos-1]
	}
	return 0
}

// before is what is left of a text that stands before a tag of the given kind
// which opens with the given marker.
func (r *rewriter) before(text string, sign, kind byte) string {
	if sign == '-' {
		return strings.TrimRightFunc(text, pythonSpace)
	}
	if sign == '+' || kind == '{' {
		return text
	}
	line := strings.LastIndexByte(text, '\n') + 1
	if (line > 0 || r.lineStart) && strings.TrimFunc(text[line:], pythonSpace) == "" {
		return text[:line]
	}
	return text
}

// text writes plain text that stands before a tag. A brace that now touches
// the tag would be read as part of its opener, so it goes into a tag of its own.
func (r *rewriter) text(s string) {
	s, brace := strings.CutSuffix(s, "{")
	r.out.WriteString(s)
	if brace {
		r.literal("{")
	}
}

// literal writes text as a tag that prints it.
func (r *rewriter) literal(s string) {
	r.out.WriteString("{{ '" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "' }}")
}

// closed moves past a closer of n bytes at the position at and past the
// whitespace that it takes with it. Its marker is the byte before it.
func (r *rewriter) closed(at, n int, sign byte, trimBlock bool) {
	r.pos = at + n
	rest := r.src[r.pos:]
	switch {
	case sign == '-':
		rest = strings.TrimLeftFunc(rest, pythonSpace)
	case sign == 0 && trimBlock:
		rest = strings.TrimPrefix(rest, "\n")
	}
	r.pos = len(r.src) - len(rest)
	r.lineStart = r.src[r.pos-1] == '\n'
}

func (r *rewriter) comment() error {
	end := strings.Index(r.src[r.pos:], "#}")
	if end < 0 {
		return errors.New("a comment is not closed")
	}
	_, sign := cutMarker(r.src[r.pos:r.pos+end], "-+")
	r.closed(r.pos+end, 2, sign, true)
	return nil
}

func (r *rewriter) expression() error {
	end, err := tagEnd(r.src[r.pos:], "}}")
	if err != nil {
		return err
	}
	body, sign := cutMarker(r.src[r.pos:r.pos+end], "-")
	// The spaces keep a sign of the expression from being read as a marker.
	r.out.WriteString("{{ " + r.tag(body) + " }}")
	r.closed(r.pos+end, 2, sign, false)
	return nil
}

func (r *rewriter) statement() error {
	end, err := tagEnd(r.src[r.pos:], "%}")
	if err != nil {
		return err
	}
	body, sign := cutMarker(r.src[r.pos:r.pos+end], "-+")
	keyword := word(body)
	if keyword == "endmacro" {
		r.out.WriteString("{{ " + leaveMacro + "() }}")
	}
	r.out.WriteString("{%+ " + r.tag(body) + " +%}")
	if keyword == "macro" {
		r.out.WriteString("{{ " + enterMacro + "() }}")
	}
	r.closed(r.pos+end, 2, sign, true)
	return nil
}

// raw copies a raw section, whose text holds no tags but its own end.
func (r *rewriter) raw() error {
	end := strings.Index(r.src[r.pos:], "%}")
	if end < 0 {
		return errors.New("a raw tag is not closed")
	}
	body, sign := cutMarker(r.src[r.pos:r.pos+end], "-")
	if strings.TrimFunc(body, pythonSpace) != "raw" {
		return fmt.Errorf("unknown statement %q", body)
	}
	r.closed(r.pos+end, 2, sign, false)

	for at := r.pos; ; at++ {
		open := strings.Index(r.src[at:], "{%")
		if open < 0 {
			return errors.New("a raw section is not closed")
		}
		at += open
		rest := r.src[at+2:]
		body, openSign := rest, byte(0)
		if rest != "" && (rest[0] == '-' || rest[0] == '+') {
			body, openSign = rest[1:], rest[0]
		}
		end := strings.Index(body, "%}")
		if end < 0 {
			return errors.New("a raw section is not closed")
		}
		inner, sign := cutMarker(body[:end], "-+")
		if strings.TrimFunc(inner, pythonSpace) != "endraw" {
			continue
		}
		r.literal(r.before(r.src[r.pos:at], openSign, '%'))
		r.closed(len(r.src)-len(body)+end, 2, sign, true)
		return nil
	}
}

// tagEnd is where the closer of a tag's body stands in s: outside of strings
// and brackets.
func tagEnd(s, closer string) (int, error) {
	depth := 0
	for i := 0; i < len(s); i++ {
		if depth == 0 && strings.HasPrefix(s[i:], closer) {
			return i, nil
		}
		switch s[i] {
		case '\'', '"':
			n := stringEnd(s[i:])
			if n < 0 {
				return 0, errors.New("a string inside a tag is not closed")
			}
			i += n
		case '(', '[', '{':
			if depth++; depth > maxBrackets {
				return 0, &LimitError{What: "nested brackets", Limit: maxBrackets}
			}
		case ')', ']', '}':
			if depth--; depth < 0 {
				return 0, fmt.Errorf("unexpected %q inside a tag", s[i])
			}
		}
	}
	return 0, fmt.Errorf("a tag is not closed with %q", closer)
}

// stringEnd is where the quote that opens s is closed, or -1.
func stringEnd(s string) int {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case s[0]:
			return i
		}
	}
	return -1
}

// cutMarker takes one of the markers off the end of a tag's body.
func cutMarker(body, markers string) (string, byte) {
	if n := len(body) - 1; n >= 0 && strings.IndexByte(markers, body[n]) >= 0 {
		return body[:n], body[n]
	}
	return body, 0
}

// word is the first word of a tag's body.
func word(body string) string {
	body = strings.TrimLeftFunc(body, pythonSpace)
	for i, c := range body {
		if c != '_' && !unicode.IsLetter(c) && !unicode.IsDigit(c) {
			return body[:i]
		}
	}
	return body
}

// pythonSpace is Python's str.isspace: Unicode's White_Space and the four
// ASCII separators.
func pythonSpace(c rune) bool {
	return unicode.IsSpace(c) || c >= '\x1c' && c <= '\x1f'
}

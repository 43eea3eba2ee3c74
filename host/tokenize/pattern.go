package tokenize

import (
	"strings"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
)

// pattern is what Split and Replace look for: a literal string or a regular expression.
type pattern struct {
	literal string
	regex   *regexp2.Regexp // nil for a literal
}

// patternJSON is {"String": "..."} or {"Regex": "..."}.
type patternJSON struct {
	String *string `json:"String"`
	Regex  *string `json:"Regex"`
}

func (p *patternJSON) compile(component string, l limits) (*pattern, error) {
	component += ".pattern"
	switch {
	case p == nil || (p.String == nil) == (p.Regex == nil):
		return nil, malformed(component, "want one of String and Regex")
	case p.Regex != nil:
		return compileRegex(component, *p.Regex, l)
	case *p.String == "":
		return nil, &UnsupportedError{Component: component + ".String", Value: "", Want: "a string that is not empty"}
	}
	return &pattern{literal: *p.String}, nil
}

func compileRegex(component, source string, l limits) (*pattern, error) {
	translated, err := translateRegex(component+".Regex", source)
	if err != nil {
		return nil, err
	}
	re, err := regexp2.Compile(translated)
	if err != nil {
		return nil, malformed(component+".Regex", "%w", err)
	}
	re.MatchTimeout = l.search
	return &pattern{regex: re}, nil
}

// span is a part of a string, in bytes, and whether the pattern matched it.
type span struct {
	start, end int
	match      bool
}

// spans cuts s, which is not empty, into the pattern's matches and what lies between them.
func (p *pattern) spans(s string, w *work) ([]span, error) {
	out := w.spans[:0]
	last := 0
	add := func(start, end int) {
		if last < start {
			out = append(out, span{last, start, false})
		}
		out = append(out, span{start, end, true})
		last = end
	}
	var err error
	if p.regex != nil {
		err = p.eachMatch(s, w, add)
	} else {
		for at := 0; ; {
			i := strings.Index(s[at:], p.literal)
			if i < 0 {
				break
			}
			at += i + len(p.literal)
			add(at-len(p.literal), at)
		}
	}
	if last < len(s) {
		out = append(out, span{last, len(s), false})
	}
	w.spans = out
	return out, err
}

// eachMatch calls add with the byte range of each match. Like Oniguruma's iterator it leaves out an empty match that
// touches the match before it.
func (p *pattern) eachMatch(s string, w *work, add func(start, end int)) error {
	w.runes = w.runes[:0]
	for _, r := range s {
		w.runes = append(w.runes, r)
	}
	atRune, atByte, lastEnd := 0, 0, -1
	forward := func(to int) int {
		for ; atRune < to; atRune++ {
			atByte += utf8.RuneLen(w.runes[atRune])
		}
		return atByte
	}
	err := p.regex.FindRunesMatches(w.runes, 0, func(m regexp2.MatchView) bool {
		start, length, _ := m.GroupRange(0)
		from := forward(start)
		to := forward(start + length)
		if length > 0 || from != lastEnd {
			add(from, to)
			lastEnd = to
		}
		return !w.budget.spent()
	})
	if err != nil {
		return tooSlow(p.regex.String(), err)
	}
	if w.budget.spent() {
		return tooSlow(p.regex.String(), nil)
	}
	return nil
}

// replaceAll returns s with each match replaced by content.
func (p *pattern) replaceAll(s, content string, w *work) (string, error) {
	if p.regex == nil {
		return strings.ReplaceAll(s, p.literal, content), nil
	}
	if s == "" {
		return s, nil
	}
	spans, err := p.spans(s, w)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, sp := range spans {
		if sp.match {
			b.WriteString(content)
		} else {
			b.WriteString(s[sp.start:sp.end])
		}
	}
	return b.String(), nil
}

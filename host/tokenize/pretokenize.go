package tokenize

import (
	"encoding/json/jsontext"
	"strings"
	"unicode"
	"unicode/utf8"
)

// preTokenizer splits the text pieces into smaller ones. It appends to out.
type preTokenizer func(in piece, out []piece, w *work) ([]piece, error)

// gpt2Pattern is the split that ByteLevel does with use_regex, from GPT-2's encoder.
const gpt2Pattern = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

func buildPreTokenizer(data jsontext.Value, l limits) ([]preTokenizer, error) {
	components, err := flatten("pre_tokenizer", "pretokenizers", data)
	if err != nil {
		return nil, err
	}
	var out []preTokenizer
	for _, c := range components {
		p, err := buildOnePreTokenizer(c, l)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

func buildOnePreTokenizer(c typedComponent, l limits) (preTokenizer, error) {
	switch c.kind {
	case "Split":
		return splitPreTokenizer(c, l)
	case "ByteLevel":
		return byteLevelPreTokenizer(c, l)
	case "Digits":
		return digitsPreTokenizer(c)
	case "Metaspace":
		return metaspacePreTokenizer(c)
	}
	return nil, unsupportedKind("pre_tokenizer", c, "Sequence, Split, ByteLevel, Digits or Metaspace")
}

// behavior says what becomes of the matches when a text is split at them.
type behavior string

const (
	isolated           behavior = "Isolated"
	removed            behavior = "Removed"
	contiguous         behavior = "Contiguous"
	mergedWithPrevious behavior = "MergedWithPrevious"
	mergedWithNext     behavior = "MergedWithNext"
)

func (b behavior) known() bool {
	switch b {
	case isolated, removed, contiguous, mergedWithPrevious, mergedWithNext:
		return true
	}
	return false
}

// apply merges spans in place as the behavior says and returns those that stay.
func (b behavior) apply(spans []span) []span {
	switch b {
	case removed:
		return keepUnmatched(spans)
	case contiguous:
		return mergeSpans(spans, func(previous, match bool) bool { return previous == match })
	case mergedWithPrevious:
		return mergeSpans(spans, func(previous, match bool) bool { return match && !previous })
	case mergedWithNext:
		return mergeWithNext(spans)
	}
	return spans
}

func keepUnmatched(spans []span) []span {
	kept := spans[:0]
	for _, s := range spans {
		if !s.match {
			kept = append(kept, s)
		}
	}
	return kept
}

// mergeSpans joins a span to the one before it where joins says so for their two match flags.
func mergeSpans(spans []span, joins func(previous, match bool) bool) []span {
	merged := spans[:0]
	previous := false
	for _, s := range spans {
		if len(merged) > 0 && joins(previous, s.match) {
			merged[len(merged)-1].end = s.end
		} else {
			merged = append(merged, s)
		}
		previous = s.match
	}
	return merged
}

// mergeWithNext works from the end, so that of two matches in a row the last is the one that joins what follows.
func mergeWithNext(spans []span) []span {
	top := len(spans) // spans[top:] are merged
	next := false
	for i := len(spans) - 1; i >= 0; i-- {
		s := spans[i]
		if top < len(spans) && s.match && !next {
			spans[top].start = s.start
		} else {
			top--
			spans[top] = s
		}
		next = s.match
	}
	return spans[top:]
}

// appendSpans appends the parts of in that spans name.
func appendSpans(in piece, spans []span, out []piece) []piece {
	for _, s := range spans {
		if s.start < s.end {
			out = append(out, piece{in.text[s.start:s.end], textPiece, in.first && s.start == 0})
		}
	}
	return out
}

func splitPreTokenizer(c typedComponent, l limits) (preTokenizer, error) {
	var s struct {
		Type     string       `json:"type"`
		Pattern  *patternJSON `json:"pattern"`
		Behavior behavior     `json:"behavior"`
		Invert   bool         `json:"invert"`
	}
	if err := decodeStrict(c.name, c.data, &s); err != nil {
		return nil, err
	}
	if !s.Behavior.known() {
		return nil, &UnsupportedError{Component: c.name + ".behavior", Value: string(s.Behavior),
			Want: "Isolated, Removed, Contiguous, MergedWithPrevious or MergedWithNext"}
	}
	p, err := s.Pattern.compile(c.name, l)
	if err != nil {
		return nil, err
	}
	return func(in piece, out []piece, w *work) ([]piece, error) {
		spans, err := p.spans(in.text, w)
		if err != nil {
			return nil, err
		}
		if s.Invert {
			for i := range spans {
				spans[i].match = !spans[i].match
			}
		}
		return appendSpans(in, s.Behavior.apply(spans), out), nil
	}, nil
}

// byteLevelJSON is shared by the pre-tokenizer, the post-processor and the decoder of that name. trim_offsets changes
// offsets only, which this package does not compute; the last two read nothing else.
type byteLevelJSON struct {
	Type           string `json:"type"`
	AddPrefixSpace *bool  `json:"add_prefix_space"`
	TrimOffsets    *bool  `json:"trim_offsets"`
	UseRegex       *bool  `json:"use_regex"`
}

func byteLevelPreTokenizer(c typedComponent, l limits) (preTokenizer, error) {
	var b byteLevelJSON
	if err := decodeStrict(c.name, c.data, &b); err != nil {
		return nil, err
	}
	if b.AddPrefixSpace == nil {
		return nil, malformed(c.name, "add_prefix_space is missing")
	}
	var split *pattern
	if b.UseRegex == nil || *b.UseRegex {
		var err error
		if split, err = compileRegex(c.name, gpt2Pattern, l); err != nil {
			return nil, err
		}
	}
	return func(in piece, out []piece, w *work) ([]piece, error) {
		if *b.AddPrefixSpace && !strings.HasPrefix(in.text, " ") {
			in.text = " " + in.text
		}
		begin := len(out)
		if split == nil {
			out = append(out, in)
		} else {
			spans, err := split.spans(in.text, w)
			if err != nil {
				return nil, err
			}
			out = appendSpans(in, spans, out)
		}
		for i := begin; i < len(out); i++ {
			out[i].text = toByteChars(out[i].text, &w.text)
		}
		return out, nil
	}, nil
}

func digitsPreTokenizer(c typedComponent) (preTokenizer, error) {
	var d struct {
		Type       string `json:"type"`
		Individual bool   `json:"individual_digits"`
	}
	if err := decodeStrict(c.name, c.data, &d); err != nil {
		return nil, err
	}
	return func(in piece, out []piece, w *work) ([]piece, error) {
		spans := w.spans[:0]
		for i, r := range in.text {
			number := unicode.IsNumber(r)
			last := len(spans) - 1
			if last >= 0 && spans[last].match == number && !(number && d.Individual) {
				spans[last].end += utf8.RuneLen(r)
			} else {
				spans = append(spans, span{i, i + utf8.RuneLen(r), number})
			}
		}
		w.spans = spans
		return appendSpans(in, spans, out), nil
	}, nil
}

// metaspaceJSON is shared by the pre-tokenizer and the decoder of that name.
type metaspaceJSON struct {
	Type           string  `json:"type"`
	Replacement    string  `json:"replacement"`
	PrependScheme  *string `json:"prepend_scheme"`
	AddPrefixSpace *bool   `json:"add_prefix_space"` // older files; false means the scheme never
	Split          *bool   `json:"split"`
	StrRep         *string `json:"str_rep"` // older files; a copy of replacement
}

const (
	prependAlways = "always"
	prependFirst  = "first"
	prependNever  = "never"
)

// read returns the prepend scheme.
func (m *metaspaceJSON) read(c typedComponent) (scheme string, err error) {
	if err := decodeStrict(c.name, c.data, m); err != nil {
		return "", err
	}
	if utf8.RuneCountInString(m.Replacement) != 1 {
		return "", malformed(c.name+".replacement", "%q is not one character", m.Replacement)
	}
	scheme = prependAlways
	if m.PrependScheme != nil {
		scheme = *m.PrependScheme
	}
	if scheme != prependAlways && scheme != prependFirst && scheme != prependNever {
		return "", &UnsupportedError{Component: c.name + ".prepend_scheme", Value: scheme, Want: "always, first or never"}
	}
	if m.AddPrefixSpace != nil && !*m.AddPrefixSpace {
		if scheme != prependNever {
			return "", malformed(c.name, "add_prefix_space false contradicts prepend_scheme %s", scheme)
		}
	}
	return scheme, nil
}

func metaspacePreTokenizer(c typedComponent) (preTokenizer, error) {
	var m metaspaceJSON
	scheme, err := m.read(c)
	if err != nil {
		return nil, err
	}
	mark := &pattern{literal: m.Replacement}
	return func(in piece, out []piece, w *work) ([]piece, error) {
		in.text = strings.ReplaceAll(in.text, " ", m.Replacement)
		prepend := scheme == prependAlways || scheme == prependFirst && in.first
		if prepend && !strings.HasPrefix(in.text, m.Replacement) {
			in.text = m.Replacement + in.text
		}
		if m.Split != nil && !*m.Split {
			return append(out, in), nil
		}
		spans, err := mark.spans(in.text, w)
		if err != nil {
			return nil, err
		}
		return appendSpans(in, mergedWithNext.apply(spans), out), nil
	}, nil
}

package tokenize

import (
	"unicode"
	"unicode/utf8"
)

// addedToken is an entry of added_tokens: a token that is found in the text before the model sees it.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"` // not inside a word
	LStrip     bool   `json:"lstrip"`      // takes the white space before it along
	RStrip     bool   `json:"rstrip"`      // takes the white space after it along
	Normalized bool   `json:"normalized"`  // found in the normalized text, in its normalized spelling
	Special    bool   `json:"special"`     // left out of a decoding that skips special tokens
}

// tokenMatcher finds added tokens: the leftmost, and of those the longest. It is a trie over bytes.
type tokenMatcher struct {
	nodes  []matcherNode
	begins [256]bool // the first bytes of the tokens
}

type matcherNode struct {
	next  map[byte]int32
	token *addedToken
}

// add returns false if the spelling, which is not empty, is there already.
func (m *tokenMatcher) add(spelling string, token *addedToken) bool {
	if len(m.nodes) == 0 {
		m.nodes = append(m.nodes, matcherNode{})
	}
	m.begins[spelling[0]] = true
	at := int32(0)
	for i := range len(spelling) {
		to, ok := m.nodes[at].next[spelling[i]]
		if !ok {
			to = int32(len(m.nodes))
			m.nodes = append(m.nodes, matcherNode{})
			if m.nodes[at].next == nil {
				m.nodes[at].next = make(map[byte]int32)
			}
			m.nodes[at].next[spelling[i]] = to
		}
		at = to
	}
	if m.nodes[at].token != nil {
		return false
	}
	m.nodes[at].token = token
	return true
}

// longest returns the longest token that s begins with and its length in bytes.
func (m *tokenMatcher) longest(s string) (token *addedToken, length int) {
	at := int32(0)
	for i := range len(s) {
		to, ok := m.nodes[at].next[s[i]]
		if !ok {
			break
		}
		at = to
		if t := m.nodes[at].token; t != nil {
			token, length = t, i+1
		}
	}
	return token, length
}

// piece is a part of the text on its way through the stages: still text, or already a token.
type piece struct {
	text  string
	id    int32 // of an added token; textPiece for text
	first bool  // begins where the original text begins
}

const textPiece = int32(-1)

// split cuts text into added tokens and the text between them and appends both to out.
func (m *tokenMatcher) split(text string, first bool, out []piece) []piece {
	addText := func(start, end int) {
		if start < end {
			out = append(out, piece{text[start:end], textPiece, first && start == 0})
		}
	}
	if len(m.nodes) == 0 {
		addText(0, len(text))
		return out
	}
	done := 0 // everything before is in out
	for at := 0; at < len(text); {
		if !m.begins[text[at]] {
			at++
			continue
		}
		token, length := m.longest(text[at:])
		if token == nil {
			at++
			continue
		}
		start, end := at, at+length
		at = end
		if token.SingleWord && insideWord(text[:start], text[end:]) {
			continue
		}
		if token.LStrip {
			start = max(spaceBefore(text[:start]), done)
		}
		if token.RStrip {
			end += spaceAfter(text[end:])
		}
		addText(done, start)
		out = append(out, piece{text[min(start, end):end], int32(token.ID), false})
		done = end
	}
	addText(done, len(text))
	return out
}

func insideWord(before, after string) bool {
	last, n := utf8.DecodeLastRuneInString(before)
	next, m := utf8.DecodeRuneInString(after)
	return n > 0 && isWordChar(last) || m > 0 && isWordChar(next)
}

// isWordChar is \w of Unicode technical standard 18: alphabetic, mark, decimal number, connector punctuation, joiner.
func isWordChar(r rune) bool {
	const zeroWidthNonJoiner, zeroWidthJoiner = '\u200C', '\u200D'
	return unicode.In(r, unicode.L, unicode.Nl, unicode.Other_Alphabetic, unicode.M, unicode.Nd, unicode.Pc) ||
		r == zeroWidthNonJoiner || r == zeroWidthJoiner
}

// spaceBefore returns where the white space at the end of s begins.
func spaceBefore(s string) int {
	for len(s) > 0 {
		r, n := utf8.DecodeLastRuneInString(s)
		if !unicode.IsSpace(r) {
			break
		}
		s = s[:len(s)-n]
	}
	return len(s)
}

// spaceAfter returns how many bytes of white space s begins with.
func spaceAfter(s string) int {
	for i, r := range s {
		if !unicode.IsSpace(r) {
			return i
		}
	}
	return len(s)
}

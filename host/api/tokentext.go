package api

import (
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/mlxcel/mlxcel/host/tokenize"
)

// spelling is how a token reads in the middle of a text.
type spelling struct {
	text  string
	bytes []int // nil where the text is not made of the token's own bytes
}

// speller spells single tokens. It is safe for concurrent use.
type speller struct {
	tokenizer *tokenize.Tokenizer
	anchor    func() (id int32, ok bool)
}

func newSpeller(t *tokenize.Tokenizer) *speller {
	s := &speller{tokenizer: t}
	s.anchor = sync.OnceValues(s.findAnchor)
	return s
}

// findAnchor returns a token of plain text. A token decoded after it keeps the space that many tokenizers drop from the start
// of a text.
func (s *speller) findAnchor() (int32, bool) {
	for id := range int32(s.tokenizer.VocabSize()) {
		if text := s.tokenizer.Decode([]int32{id}, true); len(text) == 1 && text[0] >= 'a' && text[0] <= 'z' {
			return id, true
		}
	}
	return 0, false
}

func (s *speller) spell(id int32) spelling {
	stream := s.tokenizer.NewStream(false)
	if anchor, ok := s.anchor(); ok {
		stream.Push(anchor)
	}
	text := stream.Push(id) + stream.Flush()
	if strings.ContainsRune(text, utf8.RuneError) { // part of a character
		if raw, ok := s.tokenizer.Bytes(id); ok {
			return spelling{text, ints(raw)}
		}
	}
	return spelling{text, ints([]byte(text))}
}

func ints(b []byte) []int {
	out := make([]int, len(b))
	for i, c := range b {
		out[i] = int(c)
	}
	return out
}

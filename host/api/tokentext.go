package api

import (
	"strconv"
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
		if raw := rawBytes(s.tokenizer.Token(id)); raw != nil {
			return spelling{text, raw}
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

// rawBytes returns the bytes of a token that is spelled in a byte alphabet: <0xHH> (SentencePiece's byte fallback) or
// GPT-2's printable stand-ins; nil if it is in neither.
func rawBytes(token string) []int {
	if hex, ok := strings.CutPrefix(token, "<0x"); ok && len(hex) == 3 {
		if b, err := strconv.ParseUint(hex[:2], 16, 8); err == nil && hex[2] == '>' {
			return []int{int(b)}
		}
	}
	var out []int
	for _, r := range token {
		b, ok := standInFor(r)
		if !ok {
			return nil
		}
		out = append(out, b)
	}
	return out
}

// standInFor returns the byte that a character of GPT-2's alphabet stands for. Printable bytes stand for themselves, the
// others are numbered from U+0100 in the order of their values.
func standInFor(r rune) (b int, ok bool) {
	switch {
	case r >= '!' && r <= '~', r >= 0xa1 && r <= 0xac, r >= 0xae && r <= 0xff:
		return int(r), true
	case r >= 0x100 && r <= 0x120: // 0x00 to 0x20
		return int(r - 0x100), true
	case r >= 0x121 && r <= 0x142: // 0x7f to 0xa0
		return int(r-0x121) + 0x7f, true
	case r == 0x143:
		return 0xad, true
	}
	return 0, false
}

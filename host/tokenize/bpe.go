package tokenize

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxID bounds token ids; the largest vocabularies in use have about 262,000.
const maxID = 1<<24 - 1

// modelJSON is the "model" of tokenizer.json. Dropout, when set, drops merges at random, which only training wants; the
// subword prefix and suffix belong to tokenizers older than the ones this package reads.
type modelJSON struct {
	Type                    string            `json:"type"`
	Dropout                 *float64          `json:"dropout"`
	UnkToken                *string           `json:"unk_token"`
	ContinuingSubwordPrefix *string           `json:"continuing_subword_prefix"`
	EndOfWordSuffix         *string           `json:"end_of_word_suffix"`
	FuseUnk                 bool              `json:"fuse_unk"`
	ByteFallback            bool              `json:"byte_fallback"`
	IgnoreMerges            bool              `json:"ignore_merges"`
	Vocab                   map[string]uint32 `json:"vocab"`
	Merges                  jsontext.Value    `json:"merges"`
}

// bpe is a byte pair encoding model.
type bpe struct {
	vocab        map[string]int32
	merges       map[tokenPair]merge
	byteTokens   [256]int32 // ids of <0x00> to <0xFF>, noToken where there is none
	unkToken     *string
	unk          int32 // noToken if the vocabulary lacks unkToken
	fuseUnk      bool
	byteFallback bool
	ignoreMerges bool
	cache        *wordCache
}

const noToken = int32(-1)

type tokenPair struct{ left, right int32 }

// merge is what a pair of tokens becomes and how early.
type merge struct{ rank, id int32 }

func (m *modelJSON) build() (*bpe, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	out := &bpe{
		vocab:        make(map[string]int32, len(m.Vocab)),
		unkToken:     m.UnkToken,
		unk:          noToken,
		fuseUnk:      m.FuseUnk,
		byteFallback: m.ByteFallback,
		ignoreMerges: m.IgnoreMerges,
		cache:        newWordCache(),
	}
	for token, id := range m.Vocab {
		if id > maxID {
			return nil, malformed("model.vocab", "token %q has id %d, want at most %d", token, id, maxID)
		}
		out.vocab[token] = int32(id)
	}
	if m.UnkToken != nil {
		out.unk = out.idOr(*m.UnkToken, noToken)
	}
	for i := range out.byteTokens {
		out.byteTokens[i] = out.idOr(fmt.Sprintf("<0x%02X>", i), noToken)
	}
	pairs, err := readMerges(m.Merges)
	if err != nil {
		return nil, err
	}
	return out, out.addMerges(pairs)
}

func (m *modelJSON) check() error {
	switch {
	case m.Type != "BPE":
		return unsupportedModel(m.Type)
	case m.Dropout != nil && *m.Dropout != 0:
		return &UnsupportedError{Component: "model.dropout", Value: fmt.Sprint(*m.Dropout), Want: "null"}
	case m.ContinuingSubwordPrefix != nil && *m.ContinuingSubwordPrefix != "":
		return &UnsupportedError{Component: "model.continuing_subword_prefix", Value: *m.ContinuingSubwordPrefix, Want: "null"}
	case m.EndOfWordSuffix != nil && *m.EndOfWordSuffix != "":
		return &UnsupportedError{Component: "model.end_of_word_suffix", Value: *m.EndOfWordSuffix, Want: "null"}
	case m.Vocab == nil:
		return malformed("model.vocab", "is missing")
	case isNull(m.Merges):
		return malformed("model.merges", "is missing")
	}
	return nil
}

func (m *bpe) idOr(token string, otherwise int32) int32 {
	if id, ok := m.vocab[token]; ok {
		return id
	}
	return otherwise
}

// readMerges reads both forms, ["a b", ...] and [["a", "b"], ...].
func readMerges(data jsontext.Value) ([][2]string, error) {
	var pairs [][2]string
	pairErr := json.Unmarshal(data, &pairs)
	if pairErr == nil {
		return pairs, nil
	}
	var lines []string
	if json.Unmarshal(data, &lines) != nil {
		return nil, &FormatError{Component: "model.merges", Err: pairErr}
	}
	pairs = make([][2]string, 0, len(lines))
	for _, line := range lines {
		if strings.HasPrefix(line, "#version") {
			continue
		}
		left, right, ok := strings.Cut(line, " ")
		if !ok || strings.Contains(right, " ") {
			return nil, malformed("model.merges", "%q is not two tokens", line)
		}
		pairs = append(pairs, [2]string{left, right})
	}
	return pairs, nil
}

func (m *bpe) addMerges(pairs [][2]string) error {
	m.merges = make(map[tokenPair]merge, len(pairs))
	for rank, p := range pairs {
		left, right, both := m.idOr(p[0], noToken), m.idOr(p[1], noToken), m.idOr(p[0]+p[1], noToken)
		if left == noToken || right == noToken || both == noToken {
			return malformed("model.merges", "pair %d, %q and %q: they and their union must be in the vocabulary", rank, p[0], p[1])
		}
		m.merges[tokenPair{left, right}] = merge{int32(rank), both}
	}
	return nil
}

// appendTokens appends the tokens of a word, which is not empty, to out.
func (m *bpe) appendTokens(out []int32, word string, w *work) ([]int32, error) {
	if m.ignoreMerges {
		if id, ok := m.vocab[word]; ok {
			return append(out, id), nil
		}
	}
	if len(word) >= cacheWordBytes {
		return m.mergeWord(out, word, w)
	}
	if ids, ok := m.cache.get(word); ok {
		return append(out, ids...), nil
	}
	begin := len(out)
	out, err := m.mergeWord(out, word, w)
	if err == nil {
		m.cache.put(word, out[begin:])
	}
	return out, err
}

// symbol is a token of the word being merged, in a doubly linked list.
type symbol struct {
	id         int32 // noToken once merged into the one before
	prev, next int32 // indexes; -1 at the ends
}

func (m *bpe) mergeWord(out []int32, word string, w *work) ([]int32, error) {
	if err := m.initialSymbols(word, w); err != nil {
		return nil, err
	}
	m.mergeSymbols(w)
	for i := range w.symbols {
		if id := w.symbols[i].id; id != noToken {
			out = append(out, id)
		}
	}
	return out, nil
}

// initialSymbols sets w.symbols to the word's characters. A character that the vocabulary lacks becomes its bytes'
// tokens if there are all of them, else the unknown token, else nothing. As in the reference, an unknown token waits
// for the next character to see whether it is fused, and byte tokens do not end that wait.
func (m *bpe) initialSymbols(word string, w *work) error {
	w.symbols = w.symbols[:0]
	add := func(id int32) {
		at := int32(len(w.symbols))
		w.symbols = append(w.symbols, symbol{id, at - 1, at + 1})
	}
	waiting := false
	for i := 0; i < len(word); {
		_, n := utf8.DecodeRuneInString(word[i:])
		char := word[i : i+n]
		i += n
		if id, ok := m.vocab[char]; ok {
			if waiting {
				add(m.unk)
				waiting = false
			}
			add(id)
			continue
		}
		if m.byteFallback && m.addBytes(char, add) {
			continue
		}
		if m.unkToken == nil {
			continue
		}
		if m.unk == noToken {
			return malformed("model.unk_token", "%q is not in the vocabulary, and the text has the unknown character %q", *m.unkToken, char)
		}
		if waiting && !m.fuseUnk {
			add(m.unk)
		}
		waiting = true
	}
	if waiting {
		add(m.unk)
	}
	if n := len(w.symbols); n > 0 {
		w.symbols[n-1].next = -1
	}
	return nil
}

func (m *bpe) addBytes(char string, add func(int32)) bool {
	for i := range len(char) {
		if m.byteTokens[char[i]] == noToken {
			return false
		}
	}
	for i := range len(char) {
		add(m.byteTokens[char[i]])
	}
	return true
}

// mergeSymbols merges pairs in order of rank, then position, until none is left.
func (m *bpe) mergeSymbols(w *work) {
	queue := &w.queue
	queue.items = queue.items[:0]
	push := func(at int32) {
		s := w.symbols[at]
		if found, ok := m.merges[tokenPair{s.id, w.symbols[s.next].id}]; ok {
			queue.push(candidate{found, at})
		}
	}
	for i := range len(w.symbols) - 1 {
		push(int32(i))
	}
	for len(queue.items) > 0 {
		c := queue.pop()
		left := &w.symbols[c.at]
		if left.id == noToken || left.next < 0 {
			continue
		}
		right := &w.symbols[left.next]
		// The pair may have changed since it was queued. Like the reference this asks only for the same result.
		if now, ok := m.merges[tokenPair{left.id, right.id}]; !ok || now.id != c.id {
			continue
		}
		left.id, right.id = c.id, noToken
		left.next = right.next
		if left.next >= 0 {
			w.symbols[left.next].prev = c.at
			push(c.at)
		}
		if left.prev >= 0 {
			push(left.prev)
		}
	}
}

// candidate is a merge that may be made at a symbol.
type candidate struct {
	merge
	at int32
}

func (c candidate) before(d candidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.at < d.at
}

// mergeQueue is a binary heap. (container/heap would box each item.)
type mergeQueue struct{ items []candidate }

func (q *mergeQueue) push(c candidate) {
	q.items = append(q.items, c)
	i := len(q.items) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !c.before(q.items[parent]) {
			break
		}
		q.items[i] = q.items[parent]
		i = parent
	}
	q.items[i] = c
}

func (q *mergeQueue) pop() candidate {
	top := q.items[0]
	last := len(q.items) - 1
	c := q.items[last]
	q.items = q.items[:last]
	if last == 0 {
		return top
	}
	i := 0
	for {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && q.items[child+1].before(q.items[child]) {
			child++
		}
		if !q.items[child].before(c) {
			break
		}
		q.items[i] = q.items[child]
		i = child
	}
	q.items[i] = c
	return top
}

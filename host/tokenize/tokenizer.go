package tokenize

import (
	"fmt"
	"strings"
)

// Tokenizer maps text to token ids and back. Its methods may be called from several goroutines.
type Tokenizer struct {
	limits       limits
	normalizer   []normalizer
	preTokenizer []preTokenizer
	model        *bpe
	template     template
	decoder      []newStage
	added        map[string]int32
	rawAdded     tokenMatcher // added tokens looked for in the text as it is
	normAdded    tokenMatcher // added tokens looked for in the normalized text
	tokens       []tokenInfo  // by id
}

// tokenInfo is what is known of a token id.
type tokenInfo struct {
	content  string
	decoded  string // what the decoder is fed: the normalized spelling of an added token, else content
	assigned bool
	special  bool
	skipped  bool // when special tokens are skipped
}

// work is the scratch memory of one Encode.
type work struct {
	budget  budget
	text    strings.Builder // words in the byte-level alphabet
	runes   []rune
	spans   []span
	symbols []symbol
	queue   mergeQueue
}

// addVocabulary joins the model's vocabulary and the added tokens. The reference numbers added tokens that the model
// lacks by itself, from the vocabulary's size up; a file whose ids disagree with that is refused, for it would mean one
// thing here and another there.
func (t *Tokenizer) addVocabulary(added []addedToken) error {
	if err := t.addModelTokens(added); err != nil {
		return err
	}
	t.added = make(map[string]int32, len(added))
	w := &work{budget: t.limits.start(0)}
	next := uint32(len(t.model.vocab))
	for i := range added {
		token := &added[i]
		if token.Content == "" {
			continue
		}
		if _, again := t.added[token.Content]; again {
			return malformed("added_tokens", "%q is there twice", token.Content)
		}
		want := next
		if id, ok := t.model.vocab[token.Content]; ok {
			want = uint32(id)
		} else {
			next++
		}
		if token.ID != want {
			return malformed("added_tokens", "%q has id %d, want %d, which follows from the vocabulary", token.Content, token.ID, want)
		}
		if err := t.addToken(token, w); err != nil {
			return err
		}
	}
	for i := range t.tokens {
		if id, ok := t.added[t.tokens[i].decoded]; ok {
			t.tokens[i].skipped = t.tokens[id].special
		}
	}
	return nil
}

// addModelTokens makes t.tokens, with room for the added tokens.
func (t *Tokenizer) addModelTokens(added []addedToken) error {
	top := uint32(0)
	for _, id := range t.model.vocab {
		top = max(top, uint32(id))
	}
	for _, a := range added {
		top = max(top, a.ID)
	}
	// A few ids without a token are normal; many are a broken file, and memory for nothing.
	if count := len(t.model.vocab) + len(added); top > maxID || int(top) > 2*count+1<<16 {
		return malformed("model.vocab", "ids go up to %d, but there are %d tokens", top, count)
	}
	t.tokens = make([]tokenInfo, top+1)
	for content, id := range t.model.vocab {
		if t.tokens[id].assigned {
			return malformed("model.vocab", "%q and %q both have id %d", min(content, t.tokens[id].content), max(content, t.tokens[id].content), id)
		}
		t.tokens[id] = tokenInfo{content: content, decoded: content, assigned: true}
	}
	return nil
}

func (t *Tokenizer) addToken(token *addedToken, w *work) error {
	matcher, spelling := &t.rawAdded, token.Content
	if token.Normalized {
		var err error
		if spelling, err = t.normalize(spelling, w); err != nil {
			return fmt.Errorf("added token %q: %w", token.Content, err)
		}
		matcher = &t.normAdded
	}
	if spelling == "" || !matcher.add(spelling, token) {
		return malformed("added_tokens", "%q is spelled like another added token, or not at all, once normalized", token.Content)
	}
	t.added[token.Content] = int32(token.ID)
	t.tokens[token.ID] = tokenInfo{content: token.Content, decoded: spelling, assigned: true, special: token.Special}
	return nil
}

// checkTemplate makes sure that the special tokens that Encode adds exist.
func (t *Tokenizer) checkTemplate() error {
	for _, ids := range [][]int32{t.template.before, t.template.after} {
		for _, id := range ids {
			if !t.known(id) {
				return malformed("post_processor", "id %d is no token", id)
			}
		}
	}
	return nil
}

func (t *Tokenizer) known(id int32) bool {
	return id >= 0 && int(id) < len(t.tokens) && t.tokens[id].assigned
}

// Encode returns the token ids of text. With addSpecial it also adds the special tokens that the file's post-processor
// puts around a text, such as the begin-of-sequence token. Added tokens that are spelled out in text become their ids
// either way. Bytes that are no UTF-8 count as U+FFFD, one for each maximal subpart. The error wraps ErrTooSlow if the
// file's regular expressions do not finish in bounded time.
func (t *Tokenizer) Encode(text string, addSpecial bool) ([]int32, error) {
	w := &work{budget: t.limits.start(len(text))}
	pieces, err := t.split(lossy(text), w)
	if err != nil {
		return nil, err
	}
	ids := make([]int32, 0, len(pieces)+len(t.template.before)+len(t.template.after))
	if addSpecial {
		ids = append(ids, t.template.before...)
	}
	for _, p := range pieces {
		if p.id != textPiece {
			ids = append(ids, p.id)
			continue
		}
		if ids, err = t.model.appendTokens(ids, p.text, w); err != nil {
			return nil, err
		}
	}
	if addSpecial {
		ids = append(ids, t.template.after...)
	}
	return ids, nil
}

// split returns the added tokens and words of text.
func (t *Tokenizer) split(text string, w *work) ([]piece, error) {
	var pieces []piece
	for _, p := range t.rawAdded.split(text, true, nil) {
		if p.id != textPiece {
			pieces = append(pieces, p)
			continue
		}
		normalized, err := t.normalize(p.text, w)
		if err != nil {
			return nil, err
		}
		pieces = t.normAdded.split(normalized, p.first, pieces)
	}
	for _, stage := range t.preTokenizer {
		out := make([]piece, 0, len(pieces))
		for _, p := range pieces {
			if p.id != textPiece {
				out = append(out, p)
				continue
			}
			var err error
			if out, err = stage(p, out, w); err != nil {
				return nil, err
			}
		}
		pieces = out
	}
	return pieces, nil
}

func (t *Tokenizer) normalize(s string, w *work) (string, error) {
	for _, n := range t.normalizer {
		var err error
		if s, err = n(s, w); err != nil {
			return "", err
		}
	}
	return s, nil
}

// Decode returns the text of ids. Ids that are no token are left out, and with skipSpecial the special tokens as well.
// Bytes that do not make a character become U+FFFD.
func (t *Tokenizer) Decode(ids []int32, skipSpecial bool) string {
	s := t.NewStream(skipSpecial)
	for _, id := range ids {
		s.feed(id)
	}
	s.finish()
	return string(s.out)
}

// VocabSize returns one more than the largest token id.
func (t *Tokenizer) VocabSize() int { return len(t.tokens) }

// TokenID returns the id of the token with this content, as it stands in the file.
func (t *Tokenizer) TokenID(content string) (int32, bool) {
	if id, ok := t.added[content]; ok {
		return id, true
	}
	id, ok := t.model.vocab[content]
	return id, ok
}

// Token returns the content of a token, as it stands in the file, or "" if id is no token.
func (t *Tokenizer) Token(id int32) string {
	if !t.known(id) {
		return ""
	}
	return t.tokens[id].content
}

// Bytes returns what a token stands for that is spelled in a byte alphabet: <0xHH>, which SentencePiece falls back to, or
// GPT-2's printable characters. It is false for a token in neither.
func (t *Tokenizer) Bytes(id int32) ([]byte, bool) {
	token := t.Token(id)
	if b, ok := byteToken(token); ok {
		return []byte{b}, true
	}
	if b, ok := fromByteChars(token); ok && b != "" {
		return []byte(b), true
	}
	return nil, false
}

// IsSpecial reports whether id is an added token that is marked special.
func (t *Tokenizer) IsSpecial(id int32) bool { return t.known(id) && t.tokens[id].special }

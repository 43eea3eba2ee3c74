package api

import (
	"unicode/utf8"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/stopseq"
	"github.com/mlxcel/mlxcel/host/tokenize"
)

// piece is what an answer has gained: text that is certain now, and the tokens that it came from.
type piece struct {
	text   string
	tokens []scoredToken // only where log-probabilities are asked for
}

func (p *piece) add(q piece) {
	p.text += q.text
	p.tokens = append(p.tokens, q.tokens...)
}

// scoredToken is a token of an answer with its log-probability.
type scoredToken struct {
	batch.Token
	offset int // characters before it
	start  int // bytes before it
}

// transcript turns the tokens of one answer into its text. It ends the text at a stop string.
type transcript struct {
	decoder *tokenize.Stream
	stops   *stopseq.Matcher
	scored  bool // keep the tokens

	generated int // tokens that make up the answer
	stopped   bool
	decoded   int // bytes, some of which may be held back
	runes     int // of decoded
	shown     int // bytes
	held      []scoredToken
}

func newTranscript(t *tokenize.Tokenizer, stop []string, scored bool) (*transcript, error) {
	m, err := stopseq.New(stop...)
	if err != nil {
		return nil, err
	}
	return &transcript{decoder: t.NewStream(true), stops: m, scored: scored}, nil
}

// push takes the next token. After a stop string nothing more is taken.
func (t *transcript) push(token batch.Token) piece {
	if t.stopped {
		return piece{}
	}
	t.generated++
	if token.EOS {
		return piece{}
	}
	if t.scored {
		t.held = append(t.held, scoredToken{Token: token, offset: t.runes, start: t.decoded})
	}
	return t.show(t.decoder.Push(token.ID))
}

// finish returns what was held back, when the answer has ended.
func (t *transcript) finish() piece {
	if t.stopped {
		return piece{}
	}
	p := t.show(t.decoder.Flush())
	if t.stopped {
		return p
	}
	p.text += t.stops.Flush()
	p.tokens = append(p.tokens, t.held...)
	t.held = nil
	return p
}

func (t *transcript) show(text string) piece {
	t.decoded += len(text)
	t.runes += utf8.RuneCountInString(text)
	var p piece
	p.text, _, t.stopped = t.stops.Push(text)
	t.shown += len(p.text)
	n := 0
	for n < len(t.held) && t.held[n].start < t.shown {
		n++
	}
	p.tokens, t.held = t.held[:n:n], t.held[n:]
	return p
}

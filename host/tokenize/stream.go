package tokenize

// Stream decodes a sequence of tokens as they come. What its Push calls and the final Flush return is, joined, what
// Decode returns for the whole sequence. The work for a token does not grow with the sequence.
type Stream struct {
	tokenizer   *Tokenizer
	skipSpecial bool
	stages      []stage
	out         []byte
}

// NewStream returns a decoder of one sequence. With skipSpecial it leaves out special tokens.
func (t *Tokenizer) NewStream(skipSpecial bool) *Stream {
	s := &Stream{tokenizer: t, skipSpecial: skipSpecial, stages: make([]stage, len(t.decoder))}
	for i, newStage := range t.decoder {
		s.stages[i] = newStage()
	}
	return s
}

// Push takes the next token and returns the text that is certain now: whole characters only. The bytes of a character
// that later tokens may complete are held back, also when special tokens that are skipped come between them.
func (s *Stream) Push(id int32) string {
	s.feed(id)
	return s.take()
}

// Flush returns the text that was held back, with U+FFFD for what never became a character. The stream is then ready
// for a new sequence.
func (s *Stream) Flush() string {
	s.finish()
	text := s.take()
	for i, newStage := range s.tokenizer.decoder {
		s.stages[i] = newStage()
	}
	return text
}

func (s *Stream) take() string {
	text := string(s.out)
	s.out = s.out[:0]
	return text
}

func (s *Stream) feed(id int32) {
	if !s.tokenizer.known(id) {
		return
	}
	token := &s.tokenizer.tokens[id]
	if s.skipSpecial && token.skipped {
		return
	}
	s.run(0, token.decoded)
}

// run passes a token through the stages from the one at index from.
func (s *Stream) run(from int, token string) {
	if from == len(s.stages) {
		s.out = append(s.out, token...)
		return
	}
	s.stages[from].push(token, func(t string) { s.run(from+1, t) })
}

func (s *Stream) finish() {
	for i, stage := range s.stages {
		stage.flush(func(t string) { s.run(i+1, t) })
	}
}

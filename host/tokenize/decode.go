package tokenize

import (
	"encoding/json/jsontext"
	"strings"
	"unicode/utf8"
)

// stage is one step of the decoder, at work on one sequence of tokens. It turns tokens into other tokens, and passes on
// what no later token can change.
type stage interface {
	push(token string, emit func(string))
	flush(emit func(string)) // the sequence has ended
}

// newStage makes a stage for a new sequence.
type newStage func() stage

func buildDecoder(data jsontext.Value) ([]newStage, error) {
	if isNull(data) {
		return []newStage{func() stage { return &spacedStage{} }}, nil
	}
	components, err := flatten("decoder", "decoders", data)
	if err != nil {
		return nil, err
	}
	var out []newStage
	fused := false // all tokens have become one, which arrives in parts
	for _, c := range components {
		var s newStage
		if fused {
			s, err = buildFusedStage(c)
		} else {
			s, err = buildStage(c)
		}
		if err != nil {
			return nil, err
		}
		if s != nil {
			out = append(out, s)
		}
		fused = fused || c.kind == "Fuse" || c.kind == "ByteLevel"
	}
	return out, nil
}

// buildStage returns nil for Fuse: that the tokens are one from there on shows in the stages after it.
func buildStage(c typedComponent) (newStage, error) {
	switch c.kind {
	case "ByteLevel":
		return func() stage { return &byteLevelStage{} }, decodeStrict(c.name, c.data, &byteLevelJSON{})
	case "ByteFallback":
		return func() stage { return &byteFallbackStage{} }, decodeStrict(c.name, c.data, &typeOnlyJSON{})
	case "Fuse":
		return nil, decodeStrict(c.name, c.data, &typeOnlyJSON{})
	case "Replace":
		return replaceStage(c)
	case "Strip":
		s, err := readStrip(c)
		return func() stage { return tokenStage(s.strip) }, err
	case "Metaspace":
		return metaspaceStageFor(c)
	}
	return nil, unsupportedKind("decoder", c, "Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip or Metaspace")
}

func buildFusedStage(c typedComponent) (newStage, error) {
	switch c.kind {
	case "Fuse":
		return nil, decodeStrict(c.name, c.data, &typeOnlyJSON{})
	case "Strip":
		s, err := readStrip(c)
		return func() stage { return &fusedStripStage{stripOptions: s, toCut: s.start} }, err
	}
	return nil, &UnsupportedError{Component: "decoder.Sequence", Value: c.kind, Want: "Fuse or Strip after Fuse or ByteLevel"}
}

// tokenStage maps each token by itself.
type tokenStage func(string) string

func (f tokenStage) push(token string, emit func(string)) { emit(f(token)) }
func (f tokenStage) flush(func(string))                   {}

// spacedStage joins tokens with spaces, as a file without a decoder asks for.
type spacedStage struct{ begun bool }

func (s *spacedStage) push(token string, emit func(string)) {
	if s.begun {
		token = " " + token
	}
	s.begun = true
	emit(token)
}

func (s *spacedStage) flush(func(string)) {}

func replaceStage(c typedComponent) (newStage, error) {
	var r replaceJSON
	p, err := r.read(c, limits{})
	if err != nil {
		return nil, err
	}
	if p.regex != nil { // Decode has no error to return for one that does not finish
		return nil, &UnsupportedError{Component: c.name + ".pattern.Regex", Value: *r.Pattern.Regex, Want: "a String"}
	}
	replace := func(token string) string { return strings.ReplaceAll(token, p.literal, *r.Content) }
	return func() stage { return tokenStage(replace) }, nil
}

func metaspaceStageFor(c typedComponent) (newStage, error) {
	var m metaspaceJSON
	scheme, err := m.read(c)
	if err != nil {
		return nil, err
	}
	return func() stage { return &metaspaceStage{mark: m.Replacement, dropFirst: scheme != prependNever} }, nil
}

// metaspaceStage turns marks into spaces; those of the first token were prepended and go.
type metaspaceStage struct {
	mark      string
	dropFirst bool
	begun     bool
}

func (s *metaspaceStage) push(token string, emit func(string)) {
	space := " "
	if s.dropFirst && !s.begun {
		space = ""
	}
	s.begun = true
	emit(strings.ReplaceAll(token, s.mark, space))
}

func (s *metaspaceStage) flush(func(string)) {}

// byteLevelStage joins the bytes of all tokens to text. What it holds back is at most the first three bytes of a
// character.
type byteLevelStage struct{ rest string }

func (s *byteLevelStage) push(token string, emit func(string)) {
	bytes, _ := fromByteChars(token)
	var text string
	text, s.rest = lossyPrefix(s.rest + bytes)
	if text != "" {
		emit(text)
	}
}

func (s *byteLevelStage) flush(emit func(string)) {
	if s.rest != "" {
		emit(replacement)
	}
}

// byteFallbackStage turns each run of tokens <0x00> to <0xFF> into text: its characters if the whole run is UTF-8, else
// one U+FFFD for each byte. So it holds back a run until it ends or turns out not to be UTF-8.
type byteFallbackStage struct {
	run    []byte
	valid  int  // run[:valid] are whole characters
	failed bool // the run is no UTF-8; its bytes so far are passed on
}

func (s *byteFallbackStage) push(token string, emit func(string)) {
	b, ok := byteToken(token)
	if !ok {
		s.flush(emit)
		emit(token)
		return
	}
	if s.failed {
		emit(replacement)
		return
	}
	s.run = append(s.run, b)
	switch n, class := firstSequence(string(s.run[s.valid:])); class {
	case whole:
		s.valid += n
	case broken:
		s.fail(emit)
	}
}

func (s *byteFallbackStage) fail(emit func(string)) {
	for range s.run {
		emit(replacement)
	}
	s.run, s.valid, s.failed = s.run[:0], 0, true
}

func (s *byteFallbackStage) flush(emit func(string)) {
	if s.valid < len(s.run) {
		s.fail(emit)
	} else if len(s.run) > 0 {
		emit(string(s.run))
	}
	s.run, s.valid, s.failed = s.run[:0], 0, false
}

// byteToken reads <0xHH>.
func byteToken(token string) (byte, bool) {
	if len(token) != 6 || !strings.HasPrefix(token, "<0x") || token[5] != '>' {
		return 0, false
	}
	high, ok1 := hexDigit(token[3])
	low, ok2 := hexDigit(token[4])
	return high<<4 | low, ok1 && ok2
}

func hexDigit(c byte) (byte, bool) {
	switch {
	case c >= '0' && c <= '9':
		return c - '0', true
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10, true
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}

// stripOptions cut up to start of one character off the front of a token and up to stop off its end.
type stripOptions struct {
	char        string
	start, stop int
}

func readStrip(c typedComponent) (stripOptions, error) {
	var s struct {
		Type    string `json:"type"`
		Content string `json:"content"`
		Start   uint16 `json:"start"`
		Stop    uint16 `json:"stop"`
	}
	if err := decodeStrict(c.name, c.data, &s); err != nil {
		return stripOptions{}, err
	}
	if utf8.RuneCountInString(s.Content) != 1 {
		return stripOptions{}, malformed(c.name+".content", "%q is not one character", s.Content)
	}
	return stripOptions{s.Content, int(s.Start), int(s.Stop)}, nil
}

func (s stripOptions) strip(token string) string {
	for i := 0; i < s.start && strings.HasPrefix(token, s.char); i++ {
		token = token[len(s.char):]
	}
	for i := 0; i < s.stop && strings.HasSuffix(token, s.char); i++ {
		token = token[:len(token)-len(s.char)]
	}
	return token
}

// fusedStripStage strips a token that arrives in parts. It holds back what may be its end.
type fusedStripStage struct {
	stripOptions
	toCut int // what start has left to cut
	held  int // characters held back
}

func (s *fusedStripStage) push(part string, emit func(string)) {
	for s.toCut > 0 && strings.HasPrefix(part, s.char) {
		part = part[len(s.char):]
		s.toCut--
	}
	if part == "" {
		return
	}
	s.toCut = 0
	part = strings.Repeat(s.char, s.held) + part
	s.held = 0
	for s.held < s.stop && strings.HasSuffix(part, s.char) {
		part = part[:len(part)-len(s.char)]
		s.held++
	}
	if part != "" {
		emit(part)
	}
}

func (s *fusedStripStage) flush(func(string)) {}

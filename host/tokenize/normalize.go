package tokenize

import (
	"encoding/json/jsontext"
	"slices"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// normalizer rewrites text before it is split.
type normalizer func(s string, w *work) (string, error)

func buildNormalizer(data jsontext.Value, l limits) ([]normalizer, error) {
	components, err := flatten("normalizer", "normalizers", data)
	if err != nil {
		return nil, err
	}
	var out []normalizer
	for _, c := range components {
		n, err := buildOneNormalizer(c, l)
		if err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	return out, nil
}

func buildOneNormalizer(c typedComponent, l limits) (normalizer, error) {
	switch c.kind {
	case "NFC":
		return unicodeNormalizer(c, norm.NFC)
	case "NFD":
		return unicodeNormalizer(c, norm.NFD)
	case "NFKC":
		return unicodeNormalizer(c, norm.NFKC)
	case "NFKD":
		return unicodeNormalizer(c, norm.NFKD)
	case "Prepend":
		return prependNormalizer(c)
	case "Replace":
		return replaceNormalizer(c, l)
	case "ByteLevel":
		return byteLevelNormalizer(c)
	}
	return nil, unsupportedKind("normalizer", c, "Sequence, NFC, NFD, NFKC, NFKD, Prepend, Replace or ByteLevel")
}

type typeOnlyJSON struct {
	Type string `json:"type"`
}

func unicodeNormalizer(c typedComponent, form norm.Form) (normalizer, error) {
	if err := decodeStrict(c.name, c.data, &typeOnlyJSON{}); err != nil {
		return nil, err
	}
	return func(s string, _ *work) (string, error) { return normalizeUnicode(form, s), nil }, nil
}

func byteLevelNormalizer(c typedComponent) (normalizer, error) {
	if err := decodeStrict(c.name, c.data, &typeOnlyJSON{}); err != nil {
		return nil, err
	}
	return func(s string, w *work) (string, error) { return toByteChars(s, &w.text), nil }, nil
}

func prependNormalizer(c typedComponent) (normalizer, error) {
	var p struct {
		Type    string  `json:"type"`
		Prepend *string `json:"prepend"`
	}
	if err := decodeStrict(c.name, c.data, &p); err != nil {
		return nil, err
	}
	if p.Prepend == nil {
		return nil, malformed(c.name, "prepend is missing")
	}
	return func(s string, _ *work) (string, error) {
		if s == "" {
			return s, nil
		}
		return *p.Prepend + s, nil
	}, nil
}

// replaceJSON is shared by the normalizer and the decoder of that name.
type replaceJSON struct {
	Type    string       `json:"type"`
	Pattern *patternJSON `json:"pattern"`
	Content *string      `json:"content"`
}

func (r *replaceJSON) read(c typedComponent, l limits) (*pattern, error) {
	if err := decodeStrict(c.name, c.data, r); err != nil {
		return nil, err
	}
	if r.Content == nil {
		return nil, malformed(c.name, "content is missing")
	}
	return r.Pattern.compile(c.name, l)
}

func replaceNormalizer(c typedComponent, l limits) (normalizer, error) {
	var r replaceJSON
	p, err := r.read(c, l)
	if err != nil {
		return nil, err
	}
	return func(s string, w *work) (string, error) { return p.replaceAll(s, *r.Content, w) }, nil
}

// maxMarks is below the 30 combining marks in a row after which golang.org/x/text inserts U+034F (Unicode annex 15,
// stream-safe text). The reference never does.
const maxMarks = 26

func normalizeUnicode(form norm.Form, s string) string {
	if hasLongMarkRun(form, s) {
		return normalizeExact(form, s)
	}
	return form.String(s)
}

func hasLongMarkRun(form norm.Form, s string) bool {
	run := 0
	for i := 0; i < len(s); {
		if s[i] < utf8.RuneSelf {
			run = 0
			i++
			continue
		}
		p := form.PropertiesString(s[i:])
		switch decomposes := p.Decomposition() != nil; {
		case p.CCC() == 0 && !decomposes:
			run = 0
		case p.CCC() == 0:
			run += 4 // no decomposition has more marks
		default:
			run += 1 + len(p.Decomposition())/2
		}
		if run > maxMarks {
			return true
		}
		i += max(p.Size(), 1)
	}
	return false
}

// normalizeExact is the textbook algorithm (Unicode standard, section 3.11) for marks without number. It leans on
// golang.org/x/text for the tables only, a character or a pair at a time.
func normalizeExact(form norm.Form, s string) string {
	decomposed, compose := norm.NFD, form == norm.NFC || form == norm.NFKC
	if form == norm.NFKC || form == norm.NFKD {
		decomposed = norm.NFKD
	}
	var marks []mark
	for _, r := range s {
		for _, d := range decomposed.String(string(r)) {
			marks = append(marks, mark{d, norm.NFD.PropertiesString(string(d)).CCC()})
		}
	}
	orderMarks(marks)
	if compose {
		marks = composeMarks(marks)
	}
	runes := make([]rune, len(marks))
	for i, m := range marks {
		runes[i] = m.r
	}
	return string(runes)
}

// mark is a character and its canonical combining class.
type mark struct {
	r   rune
	ccc uint8
}

func orderMarks(marks []mark) {
	for i := 0; i < len(marks); {
		if marks[i].ccc == 0 {
			i++
			continue
		}
		end := i
		for end < len(marks) && marks[end].ccc != 0 {
			end++
		}
		slices.SortStableFunc(marks[i:end], func(a, b mark) int { return int(a.ccc) - int(b.ccc) })
		i = end
	}
}

func composeMarks(marks []mark) []mark {
	out := marks[:0]
	starter := -1
	for _, m := range marks {
		if starter >= 0 {
			last := out[len(out)-1]
			adjacent := len(out)-1 == starter
			if adjacent || last.ccc != 0 && last.ccc < m.ccc {
				if c, ok := composition(out[starter].r, m.r); ok {
					out[starter].r = c
					continue
				}
			}
		}
		if m.ccc == 0 {
			starter = len(out)
		}
		out = append(out, m)
	}
	return out
}

// composition returns the character that a followed by b composes to.
func composition(a, b rune) (rune, bool) {
	pair := norm.NFC.String(string([]rune{a, b}))
	r, n := utf8.DecodeRuneInString(pair)
	return r, n == len(pair)
}

package chat

import (
	"strings"
)

// Names that adapt puts into tags; see functions.go for what they do.
const (
	nameUndefined = "__undefined"
	nameAttribute = "__attribute"
	nameApply     = "__apply"
	prefixFilter  = "__" // before a filter's, method's or test's own name
	prefixNot     = "__not_"
)

// Where the engine knows fewer things than Jinja2 or means others by them, a
// filter of ours takes the place: a filter is all that a variable can add.
var (
	adaptedMethods = map[string]bool{"rsplit": true, "splitlines": true}
	adaptedFilters = map[string]bool{"format": true, "title": true}
	adaptedTests   = map[string]bool{"iterable": true, "sequence": true}
	// dictMethods hide members of a namespace that bear their names.
	dictMethods = map[string]bool{"items": true, "keys": true, "values": true, "get": true, "pop": true, "update": true}
)

// adapt rewrites the body of a tag for the engine and trims it:
//
//	f(*a, b)          f|__apply(a, b)
//	s.rsplit(x)       s|__rsplit(x), likewise splitlines
//	s|format(x)       s|__format(x), likewise title
//	x is iterable     x |__iterable, likewise sequence, and both with "not"
//	n.items           n|__attribute('items') where it is not called
//	null              __undefined, for Jinja2 knows only none
func adapt(body string) string {
	a := adapter{src: strings.TrimFunc(body, pythonSpace)}
	for a.pos < len(a.src) {
		a.next()
	}
	return a.out.String()
}

type adapter struct {
	src  string
	pos  int
	last byte // the last byte that is no space
	out  strings.Builder
}

func (a *adapter) next() {
	c := a.src[a.pos]
	end := a.pos + 1
	switch {
	case c == '\'' || c == '"':
		if n := stringEnd(a.src[a.pos:]); n > 0 {
			end = a.pos + n + 1
		}
	case c == '.':
		end = a.dot()
		if end == 0 {
			return
		}
	case c == '(':
		if a.splat() {
			return
		}
	case wordByte(c):
		end = wordEnd(a.src, a.pos)
		if a.word(a.src[a.pos:end], end) {
			return
		}
	}
	a.put(a.src[a.pos:end], end)
}

// put writes s for what stands before end.
func (a *adapter) put(s string, end int) {
	a.out.WriteString(s)
	if trimmed := strings.TrimRightFunc(a.src[:end], pythonSpace); trimmed != "" {
		a.last = trimmed[len(trimmed)-1]
	}
	a.pos = end
}

// dot reads what follows a dot. It gives 0 if it has rewritten it.
func (a *adapter) dot() int {
	start := skipSpace(a.src, a.pos+1)
	end := wordEnd(a.src, start)
	name, after := a.src[start:end], skipSpace(a.src, end)
	called := strings.HasPrefix(a.src[after:], "(")
	switch {
	case adaptedMethods[name] && called:
		a.put("|"+prefixFilter+name, end)
		return 0
	case dictMethods[name] && !called && !assigned(a.src[after:]):
		a.put("|"+nameAttribute+"('"+name+"')", end)
		return 0
	}
	return max(end, a.pos+1)
}

// splat rewrites a call whose first argument is "*" and a list.
func (a *adapter) splat() bool {
	star := skipSpace(a.src, a.pos+1)
	if !strings.HasPrefix(a.src[star:], "*") || strings.HasPrefix(a.src[star:], "**") {
		return false
	}
	if !wordByte(a.last) && a.last != ')' && a.last != ']' {
		return false
	}
	a.put("|"+nameApply+"(", star+1)
	return true
}

// word rewrites a word that is no attribute, and says whether it has.
func (a *adapter) word(w string, end int) bool {
	switch {
	case a.last == '|' && adaptedFilters[w]:
		a.put(prefixFilter+w, end)
		return true
	case w == "null" && !assigned(a.src[skipSpace(a.src, end):]):
		a.put(nameUndefined, end)
		return true
	case w == "is":
		return a.test(end)
	}
	return false
}

func (a *adapter) test(end int) bool {
	prefix := prefixFilter
	start := skipSpace(a.src, end)
	end = wordEnd(a.src, start)
	if a.src[start:end] == "not" {
		prefix = prefixNot
		start = skipSpace(a.src, end)
		end = wordEnd(a.src, start)
	}
	name := a.src[start:end]
	if !adaptedTests[name] {
		return false
	}
	a.put("|"+prefix+name, end)
	return true
}

// assigned says whether what follows a name gives it a value.
func assigned(rest string) bool {
	return strings.HasPrefix(rest, "=") && !strings.HasPrefix(rest, "==")
}

func skipSpace(s string, at int) int {
	return len(s) - len(strings.TrimLeftFunc(s[at:], pythonSpace))
}

func wordEnd(s string, at int) int {
	for at < len(s) && wordByte(s[at]) {
		at++
	}
	return at
}

func wordByte(c byte) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c >= 0x80
}

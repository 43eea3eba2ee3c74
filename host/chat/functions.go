package chat

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/ardanlabs/jinja"
)

// function is what a template can call; as a filter it gets what stands before
// the bar as its first argument.
type function = func(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error)

// functions are those of one rendering. They stand before the engine's own of
// the same name.
func functions(now func() time.Time) map[string]function {
	depth := 0
	namespaces := map[*jinja.Dict]bool{}
	return map[string]function{
		"raise_exception": raise,
		"range":           boundedRange,
		"strftime_now": func(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
			format, ok := argument(args, kwargs, "format")
			if !ok || !format.IsString() {
				return jinja.Value{}, errors.New("strftime_now: wanted a format")
			}
			return jinja.NewString(strftime(now(), format.AsString())), nil
		},
		enterMacro: func([]jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
			if depth++; depth > maxMacroDepth {
				return jinja.Value{}, &LimitError{What: "macros that call one another", Limit: maxMacroDepth}
			}
			return jinja.NewString(""), nil
		},
		leaveMacro: func([]jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
			depth--
			return jinja.NewString(""), nil
		},
		"namespace": func(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
			ns, err := namespace(args, kwargs)
			if err == nil {
				namespaces[ns.AsDict()] = true
			}
			return ns, err
		},
		nameAttribute: func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
			return attribute(args[0], args[1].AsString(), namespaces)
		},
		nameApply:                   apply,
		prefixFilter + "rsplit":     rsplit,
		prefixFilter + "splitlines": splitlines,
		prefixFilter + "format":     format,
		prefixFilter + "title":      title,
		prefixFilter + "iterable":   test(iterable, true),
		prefixNot + "iterable":      test(iterable, false),
		prefixFilter + "sequence":   test(iterable, true),
		prefixNot + "sequence":      test(iterable, false),
	}
}

func raise(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	message, ok := argument(args, kwargs, "message")
	if !ok {
		return jinja.Value{}, errors.New("raise_exception: wanted a message")
	}
	return jinja.Value{}, &RefusedError{Message: str(message)}
}

// argument is a function's only argument, by place or by name.
func argument(args []jinja.Value, kwargs map[string]jinja.Value, name string) (jinja.Value, bool) {
	if len(args) == 1 {
		return args[0], true
	}
	v, ok := kwargs[name]
	return v, ok && len(args) == 0
}

// str is Python's str of a value, which prints undefined as nothing.
func str(v jinja.Value) string {
	switch {
	case v.IsString():
		return v.AsString()
	case v.IsUndefined():
		return ""
	}
	return v.String()
}

// boundedRange is Python's range, as a list.
func boundedRange(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if len(args) < 1 || len(args) > 3 {
		return jinja.Value{}, fmt.Errorf("range: wanted 1 to 3 arguments, got %d", len(args))
	}
	bounds := []int64{0, 0, 1}
	for i, a := range args {
		if !a.IsInt() {
			return jinja.Value{}, fmt.Errorf("range: wanted a whole number, got %s", a)
		}
		bounds[i] = a.AsInt()
	}
	start, stop, step := bounds[0], bounds[1], bounds[2]
	if len(args) == 1 {
		start, stop = 0, bounds[0]
	}
	if step == 0 {
		return jinja.Value{}, errors.New("range: the step must not be zero")
	}
	var items []jinja.Value
	for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
		if len(items) == maxRange {
			return jinja.Value{}, &LimitError{What: "elements of a range", Limit: maxRange}
		}
		items = append(items, jinja.NewInt(i))
		if next := i + step; (next > i) != (step > 0) {
			break // past the ends of int64, and so past stop
		}
	}
	return jinja.NewList(items), nil
}

// namespace is Jinja2's object with attributes that a loop can set.
func namespace(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	ns := jinja.NewDict()
	for _, a := range args {
		if !a.IsDict() {
			return jinja.Value{}, fmt.Errorf("namespace: wanted a mapping, got %s", a)
		}
		for _, key := range a.AsDict().Keys {
			ns.AsDict().Set(key, a.AsDict().Data[key])
		}
	}
	for key, v := range kwargs {
		ns.AsDict().Set(key, v)
	}
	return ns, nil
}

// attribute is a value's attribute that bears the name of a dict's method: of a
// namespace what was set, of a dict the method, of which only that it is there
// is known.
func attribute(of jinja.Value, name string, namespaces map[*jinja.Dict]bool) (jinja.Value, error) {
	if !of.IsDict() {
		return jinja.Undefined(), nil
	}
	if namespaces[of.AsDict()] {
		v, _ := of.AsDict().Get(name)
		return v, nil
	}
	return jinja.NewCallable(name, func([]jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
		return jinja.Value{}, fmt.Errorf("a dict's method %s can only be called where it is named", name)
	}), nil
}

// apply calls a function with a list's elements as its first arguments.
func apply(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) < 2 || !args[0].IsCallable() || !args[1].IsList() {
		return jinja.Value{}, errors.New("a call with * wants a function and a list")
	}
	all := append(slices.Clone(args[1].AsList().Items), args[2:]...)
	return args[0].AsCallable().Fn(all, kwargs)
}

// test is a test as a filter.
func test(holds func(jinja.Value) bool, want bool) function {
	return func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		return jinja.NewBool(holds(args[0]) == want), nil
	}
}

// iterable is also Jinja2's test for a sequence: both hold for undefined, which
// has no elements.
func iterable(v jinja.Value) bool {
	return v.IsList() || v.IsDict() || v.IsString() || v.IsUndefined()
}

// rsplit is Python's str.rsplit.
func rsplit(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, rest, err := self("rsplit", args)
	if err != nil {
		return jinja.Value{}, err
	}
	separator, limit := kwargs["sep"], kwargs["maxsplit"]
	if len(rest) > 0 {
		separator = rest[0]
	}
	if len(rest) > 1 {
		limit = rest[1]
	}
	splits := -1
	if limit.IsInt() {
		splits = int(limit.AsInt())
	}
	var parts []string
	if separator.IsString() && separator.AsString() != "" {
		parts = rsplitAt(s, separator.AsString(), splits)
	} else if separator.IsNone() || separator.IsUndefined() {
		parts = rsplitSpace(s, splits)
	} else {
		return jinja.Value{}, fmt.Errorf("rsplit: %s is no separator", separator)
	}
	slices.Reverse(parts)
	return stringList(parts), nil
}

// rsplitAt gives the parts from the last to the first.
func rsplitAt(s, separator string, splits int) []string {
	var parts []string
	for len(parts) != splits {
		at := strings.LastIndex(s, separator)
		if at < 0 {
			break
		}
		parts = append(parts, s[at+len(separator):])
		s = s[:at]
	}
	return append(parts, s)
}

// rsplitSpace gives the parts from the last to the first.
func rsplitSpace(s string, splits int) []string {
	var parts []string
	for {
		s = strings.TrimRightFunc(s, pythonSpace)
		if s == "" {
			return parts
		}
		if len(parts) == splits {
			return append(parts, s)
		}
		before := strings.TrimRightFunc(s, func(c rune) bool { return !pythonSpace(c) })
		parts = append(parts, s[len(before):])
		s = before
	}
}

// splitlines is Python's str.splitlines, without the line ends.
func splitlines(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	s, rest, err := self("splitlines", args)
	if err != nil {
		return jinja.Value{}, err
	}
	if len(rest)+len(kwargs) > 0 {
		return jinja.Value{}, errors.New("splitlines: keepends is not supported")
	}
	s = strings.ReplaceAll(s, "\r\n", "\n")
	s = strings.Map(func(c rune) rune {
		if strings.ContainsRune("\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029", c) {
			return '\n'
		}
		return c
	}, s)
	if s == "" {
		return jinja.NewList(nil), nil
	}
	return stringList(strings.Split(strings.TrimSuffix(s, "\n"), "\n")), nil
}

// self is the string on which a method is called, and its arguments.
func self(method string, args []jinja.Value) (string, []jinja.Value, error) {
	if !args[0].IsString() {
		return "", nil, fmt.Errorf("%s: wanted a string, got %s", method, args[0])
	}
	return args[0].AsString(), args[1:], nil
}

func stringList(parts []string) jinja.Value {
	items := make([]jinja.Value, len(parts))
	for i, p := range parts {
		items[i] = jinja.NewString(p)
	}
	return jinja.NewList(items)
}

// format is Jinja2's filter: Python's % with the conversions s, r, d and %.
func format(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	s, rest, err := self("format", args)
	if err != nil {
		return jinja.Value{}, err
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		i++
		if i < len(s) && s[i] == '%' {
			b.WriteByte('%')
			continue
		}
		if i == len(s) || !strings.ContainsRune("srd", rune(s[i])) {
			return jinja.Value{}, fmt.Errorf("format: %q is not supported, only %%s, %%r, %%d and %%%%", s)
		}
		if len(rest) == 0 {
			return jinja.Value{}, fmt.Errorf("format: not enough arguments for %q", s)
		}
		switch s[i] {
		case 's':
			b.WriteString(str(rest[0]))
		case 'r':
			b.WriteString(rest[0].String())
		case 'd':
			if !rest[0].IsInt() {
				return jinja.Value{}, fmt.Errorf("format: %%d wants a whole number, got %s", rest[0])
			}
			b.WriteString(rest[0].String())
		}
		rest = rest[1:]
	}
	if len(rest) > 0 {
		return jinja.Value{}, fmt.Errorf("format: too many arguments for %q", s)
	}
	return jinja.NewString(b.String()), nil
}

// title is Jinja2's filter: a capital after each space, hyphen or opening
// bracket, lower case elsewhere.
func title(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	start := true
	return jinja.NewString(strings.Map(func(c rune) rune {
		first := start
		start = pythonSpace(c) || strings.ContainsRune("-({[<", c)
		if first {
			return unicode.ToUpper(c)
		}
		return unicode.ToLower(c)
	}, str(args[0]))), nil
}

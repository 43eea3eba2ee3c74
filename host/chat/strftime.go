package chat

import (
	"fmt"
	"strings"
	"time"
)

// strftime formats a time by Python's directives (datetime.strftime in the C
// locale, with glibc's "-" that drops padding). %z and %Z are empty, as for the
// naive local time that transformers uses. An unknown directive stays as it is.
func strftime(t time.Time, format string) string {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		start := i
		i++
		bare := format[i] == '-' && i+1 < len(format)
		if bare {
			i++
		}
		s, ok := directive(t, format[i])
		if !ok {
			s = format[start : i+1]
		} else if bare {
			s = unpadded(s)
		}
		b.WriteString(s)
	}
	return b.String()
}

func directive(t time.Time, c byte) (string, bool) {
	layouts := map[byte]string{
		'Y': "2006", 'm': "01", 'd': "02", 'H': "15", 'M': "04", 'S': "05", 'y': "06", 'I': "03", 'p': "PM",
		'B': "January", 'b': "Jan", 'h': "Jan", 'A': "Monday", 'a': "Mon", 'e': "_2", 'j': "002",
		'F': "2006-01-02", 'T': "15:04:05", 'R': "15:04", 'D': "01/02/06",
		'c': "Mon Jan _2 15:04:05 2006", 'x': "01/02/06", 'X': "15:04:05",
	}
	if layout, ok := layouts[c]; ok {
		return t.Format(layout), true
	}
	switch c {
	case '%':
		return "%", true
	case 'n':
		return "\n", true
	case 't':
		return "\t", true
	case 'z', 'Z':
		return "", true
	case 'f':
		return fmt.Sprintf("%06d", t.Nanosecond()/1000), true
	case 'w':
		return fmt.Sprint(int(t.Weekday())), true
	case 'u':
		return fmt.Sprint((int(t.Weekday())+6)%7 + 1), true
	case 's':
		return fmt.Sprint(t.Unix()), true
	}
	return "", false
}

// unpadded drops the padding of a number, but keeps its last digit.
func unpadded(s string) string {
	if trimmed := strings.TrimLeft(s, "0 "); trimmed != "" || s == "" {
		return trimmed
	}
	return s[len(s)-1:]
}

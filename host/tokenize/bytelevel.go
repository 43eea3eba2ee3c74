package tokenize

import "strings"

// The byte-level alphabet of GPT-2 writes each byte as a printable character: bytes that are printable in Latin-1 as
// themselves, the others as U+0100 and up in order.
var byteChars, charBytes = byteAlphabet()

func byteAlphabet() (chars [256]string, bytes map[rune]byte) {
	bytes = make(map[rune]byte, 256)
	next := rune(0x100)
	for i := range 256 {
		r := rune(i)
		if printable := i >= '!' && i <= '~' || i >= 0xA1 && i != 0xAD; !printable {
			r = next
			next++
		}
		chars[i], bytes[r] = string(r), byte(i)
	}
	return chars, bytes
}

// toByteChars spells the bytes of s in the alphabet. The result lies in b, which many words share: Go's strings.Builder
// never changes what it has handed out.
func toByteChars(s string, b *strings.Builder) string {
	begin := b.Len()
	for i := range len(s) {
		b.WriteString(byteChars[s[i]])
	}
	return b.String()[begin:]
}

// fromByteChars returns the bytes that a token's characters stand for. A token with any other character, such as an added
// one, stands for itself, and is told by false.
func fromByteChars(token string) (string, bool) {
	b := make([]byte, 0, len(token))
	for _, r := range token {
		c, ok := charBytes[r]
		if !ok {
			return token, false
		}
		b = append(b, c)
	}
	return string(b), true
}

package tokenize

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json/v2"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestOracle compares with Python tokenizers on the files that scripts/oracle/tokenizers/make.py fetches and writes.
func TestOracle(t *testing.T) {
	dir := os.Getenv("MLXCEL_TOKENIZER_ORACLE")
	if dir == "" {
		t.Skip("MLXCEL_TOKENIZER_ORACLE is not set: run scripts/oracle/tokenizers/make.py and set it to the absolute path of its output folder")
	}
	var paths map[string]string
	readJSON(t, filepath.Join(dir, "tokenizers.json"), &paths)
	if len(paths) == 0 {
		t.Fatal("no tokenizers in the oracle folder")
	}
	allowed := readAllowed(t)
	for name := range allowed {
		if _, ok := paths[name]; !ok && !optionalTokenizers[name] {
			t.Errorf("unicode_differences.txt names %s, which the oracle folder lacks", name)
		}
	}
	for name, path := range paths {
		t.Run(name, func(t *testing.T) {
			tok, err := Open(filepath.Dir(filepath.Join(dir, path)))
			if filepath.Base(path) != "tokenizer.json" {
				tok, err = New(readFile(t, filepath.Join(dir, path)))
			}
			if err != nil {
				t.Fatal(err)
			}
			compareTexts(t, tok, filepath.Join(dir, "goldens", name, "texts.jsonl"), allowed[name])
			compareLists(t, tok, filepath.Join(dir, "goldens", name, "lists.jsonl"))
			compareSweep(t, tok, filepath.Join(dir, "goldens", name, "sweep"), allowed[name])
		})
	}
}

// optionalTokenizers are fetched with make.py --all only.
var optionalTokenizers = map[string]bool{"deepseek_v3": true, "gptoss": true}

type golden struct {
	Kind    string  `json:"kind"`
	Text    string  `json:"text"` // base64
	Plain   []int32 `json:"plain"`
	Special []int32 `json:"special"`
	Skip    string  `json:"skip"`
	Keep    string  `json:"keep"`
}

func compareTexts(t *testing.T, tok *Tokenizer, path string, allowed map[rune]bool) {
	count, wrong, excused := 0, 0, 0
	for line := range lines(t, path) {
		var g golden
		unmarshal(t, line, &g)
		raw, err := base64.StdEncoding.DecodeString(g.Text)
		if err != nil {
			t.Fatal(err)
		}
		count++
		if compareDecoding(t, tok, g.Special, g.Skip, g.Keep) {
			wrong++
		}
		same := sameIDs(t, tok, string(raw), false, g.Plain) && sameIDs(t, tok, string(raw), true, g.Special)
		if same {
			continue
		}
		if strings.ContainsFunc(string(raw), func(r rune) bool { return allowed[r] }) {
			excused++
			continue
		}
		if wrong++; wrong <= 5 {
			got, err := tok.Encode(string(raw), false)
			t.Errorf("%s: %+q\n got %v (error %v)\nwant %v", g.Kind, shorten(string(raw)), clip(got), err, clip(g.Plain))
		}
	}
	if count == 0 {
		t.Error("no texts")
	}
	t.Logf("%d of %d texts wrong, %d differ by a listed character", wrong, count, excused)
}

func sameIDs(t *testing.T, tok *Tokenizer, text string, special bool, want []int32) bool {
	t.Helper()
	got, err := tok.Encode(text, special)
	return err == nil && slices.Equal(got, want)
}

// compareDecoding reports whether something is wrong.
func compareDecoding(t *testing.T, tok *Tokenizer, ids []int32, skip, keep string) bool {
	t.Helper()
	bad := false
	for _, c := range []struct {
		skipSpecial bool
		want        string
	}{{true, skip}, {false, keep}} {
		if got := tok.Decode(ids, c.skipSpecial); got != c.want {
			bad = true
			t.Errorf("decode %v, skip %v\n got %+q\nwant %+q", clip(ids), c.skipSpecial, shorten(got), shorten(c.want))
		}
		if got := streamed(t, tok, ids, c.skipSpecial); got != c.want {
			bad = true
			t.Errorf("stream %v, skip %v\n got %+q\nwant %+q", clip(ids), c.skipSpecial, shorten(got), shorten(c.want))
		}
	}
	return bad
}

func streamed(t *testing.T, tok *Tokenizer, ids []int32, skip bool) string {
	t.Helper()
	var b strings.Builder
	s := tok.NewStream(skip)
	for _, id := range ids {
		part := s.Push(id)
		if !utf8.ValidString(part) {
			t.Errorf("Push(%d) of %v splits a character: %q", id, clip(ids), part)
		}
		b.WriteString(part)
	}
	b.WriteString(s.Flush())
	return b.String()
}

func compareLists(t *testing.T, tok *Tokenizer, path string) {
	for line := range lines(t, path) {
		var g struct {
			IDs  []int32 `json:"ids"`
			Skip string  `json:"skip"`
			Keep string  `json:"keep"`
		}
		unmarshal(t, line, &g)
		if compareDecoding(t, tok, g.IDs, g.Skip, g.Keep) {
			return
		}
	}
}

// compareSweep encodes every character in six surroundings. The characters that differ must be exactly the listed ones.
func compareSweep(t *testing.T, tok *Tokenizer, path string, allowed map[rune]bool) {
	data, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	const entry = 4 + 8
	var differ []rune
	swept := map[rune]bool{}
	for ; len(data) >= entry; data = data[entry:] {
		r := rune(binary.LittleEndian.Uint32(data))
		c := string(r)
		swept[r] = true
		ids, err := tok.Encode("a"+c+"a 1"+c+"1 "+c+c+"\n"+c+" ."+c, false)
		if err != nil {
			t.Fatalf("U+%04X: %v", r, err)
		}
		var b []byte
		for _, id := range ids {
			b = binary.LittleEndian.AppendUint32(b, uint32(id))
		}
		if sum := sha256.Sum256(b); !bytes.Equal(sum[:8], data[4:entry]) {
			differ = append(differ, r)
		}
	}
	t.Logf("%d of %d characters differ", len(differ), len(swept))
	var unlisted []rune
	for _, r := range differ {
		if !allowed[r] {
			unlisted = append(unlisted, r)
		}
		delete(swept, r)
	}
	if len(unlisted) > 0 {
		t.Errorf("differ without being listed in unicode_differences.txt: %s", ranges(unlisted))
	}
	for r := range allowed {
		if swept[r] {
			t.Errorf("U+%04X is listed in unicode_differences.txt but does not differ", r)
		}
	}
}

func ranges(runes []rune) string {
	var parts []string
	for i := 0; i < len(runes); {
		end := i
		for end+1 < len(runes) && runes[end+1] == runes[end]+1 {
			end++
		}
		if end > i {
			parts = append(parts, fmt.Sprintf("%04X-%04X", runes[i], runes[end]))
		} else {
			parts = append(parts, fmt.Sprintf("%04X", runes[i]))
		}
		i = end + 1
	}
	return strings.Join(parts, " ")
}

// readAllowed reads the characters for which Go's Unicode tables and the reference's differ: a tokenizer, then code
// points and ranges of them.
func readAllowed(t *testing.T) map[string]map[rune]bool {
	t.Helper()
	out := map[string]map[rune]bool{}
	for line := range lines(t, filepath.Join("testdata", "unicode_differences.txt")) {
		fields := strings.Fields(string(line))
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		if out[fields[0]] == nil {
			out[fields[0]] = map[rune]bool{}
		}
		for _, f := range fields[1:] {
			first, last, isRange := strings.Cut(f, "-")
			if !isRange {
				last = first
			}
			low, err1 := strconv.ParseInt(first, 16, 32)
			high, err2 := strconv.ParseInt(last, 16, 32)
			if err1 != nil || err2 != nil {
				t.Fatalf("unicode_differences.txt: bad range %q", f)
			}
			for c := low; c <= high; c++ {
				out[fields[0]][rune(c)] = true
			}
		}
	}
	return out
}

func lines(t *testing.T, path string) iter.Seq[[]byte] {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return func(yield func([]byte) bool) {
		defer f.Close()
		scanner := bufio.NewScanner(f)
		scanner.Buffer(nil, 64<<20)
		for scanner.Scan() {
			if !yield(scanner.Bytes()) {
				return
			}
		}
		if err := scanner.Err(); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func readJSON(t *testing.T, path string, into any) {
	t.Helper()
	unmarshal(t, readFile(t, path), into)
}

func unmarshal(t *testing.T, data []byte, into any) {
	t.Helper()
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatal(err)
	}
}

func clip(ids []int32) []int32 { return ids[:min(len(ids), 60)] }

func shorten(s string) string { return s[:min(len(s), 200)] }

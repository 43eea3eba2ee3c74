package tokenize

import (
	"encoding/json/v2"
	"path/filepath"
	"strings"
	"testing"
)

// testFiles are the tokenizers in testdata: byte-level without and with a begin-of-sequence token, and one with byte
// fallback and the token spellings of SentencePiece.
var testFiles = []string{"byte_level.json", "byte_level_bos.json", "byte_fallback.json"}

func load(t testing.TB, name string) *Tokenizer {
	t.Helper()
	tok, err := New(readFile(t, filepath.Join("testdata", name)))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// patched returns a file of testdata with the value at a dotted path replaced by JSON, or removed if that is empty.
func patched(t testing.TB, name, path, value string) []byte {
	t.Helper()
	var file map[string]any
	if err := json.Unmarshal(readFile(t, filepath.Join("testdata", name)), &file); err != nil {
		t.Fatal(err)
	}
	at := file
	keys := strings.Split(path, ".")
	for _, key := range keys[:len(keys)-1] {
		at = at[key].(map[string]any)
	}
	last := keys[len(keys)-1]
	delete(at, last)
	if value != "" {
		var v any
		if err := json.Unmarshal([]byte(value), &v); err != nil {
			t.Fatalf("%s: %v", value, err)
		}
		at[last] = v
	}
	data, err := json.Marshal(file, json.Deterministic(true))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func loadPatched(t testing.TB, name, path, value string) *Tokenizer {
	t.Helper()
	tok, err := New(patched(t, name, path, value))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// tinyFile is a whole tokenizer.json of the characters a to d and space, with the parts that tests want to vary.
func tinyFile(addedTokens, normalizer, preTokenizer, decoder string) []byte {
	return []byte(`{"version":"1.0","added_tokens":` + addedTokens + `,"normalizer":` + normalizer +
		`,"pre_tokenizer":` + preTokenizer + `,"decoder":` + decoder + `,"model":{"type":"BPE",` +
		`"vocab":{"a":0,"b":1,"c":2,"d":3," ":4,"ab":5,"cd":6,"abcd":7},"merges":["a b","c d","ab cd"]}}`)
}

func loadTiny(t testing.TB, addedTokens, normalizer, preTokenizer, decoder string) *Tokenizer {
	t.Helper()
	tok, err := New(tinyFile(addedTokens, normalizer, preTokenizer, decoder))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func newWork() *work { return &work{budget: defaultLimits().start(0)} }

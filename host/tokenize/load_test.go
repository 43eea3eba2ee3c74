package tokenize

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tokenizer.json")
	if _, err := Open(dir); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("without a file: %v, want fs.ErrNotExist and the path", err)
	}
	write := func(data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write([]byte(`{"version":`))
	var format *FormatError
	if _, err := Open(dir); !errors.As(err, &format) || !strings.Contains(err.Error(), path) {
		t.Errorf("malformed: %v, want a FormatError and the path", err)
	}
	write(readFile(t, "testdata/byte_level.json"))
	if _, err := Open(dir); err != nil {
		t.Error(err)
	}
}

func TestUnsupported(t *testing.T) {
	byteLevel := `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}`
	for _, c := range []struct{ path, value, component, badValue string }{
		{"version", `"2.0"`, "version", "2.0"},
		{"extra", `1`, "option", "extra"},
		{"truncation", `{"max_length":512}`, "truncation", `{"max_length":512}`},
		{"padding", `{"strategy":{"Fixed":8}}`, "padding", `{"strategy":{"Fixed":8}}`},
		{"padding", `{"pad_to_multiple_of":8,"strategy":"BatchLongest"}`, "padding", `{"pad_to_multiple_of":8,"strategy":"BatchLongest"}`},
		{"model.type", `"Unigram"`, "model.type", "Unigram"},
		{"model", `{"type":"WordPiece","unk_token":"[UNK]","max_input_chars_per_word":100,"vocab":{}}`, "model.type", "WordPiece"},
		{"model", `{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0]]}`, "model.type", "Unigram"},
		{"model.type", ``, "model.type", ""},
		{"model.dropout", `0.1`, "model.dropout", "0.1"},
		{"model.continuing_subword_prefix", `"##"`, "model.continuing_subword_prefix", "##"},
		{"model.end_of_word_suffix", `"</w>"`, "model.end_of_word_suffix", "</w>"},
		{"model.byte_magic", `true`, "option", "model.byte_magic"},
		{"normalizer", `{"type":"Lowercase"}`, "normalizer.type", "Lowercase"},
		{"normalizer", `{"type":"Precompiled","precompiled_charsmap":""}`, "normalizer.type", "Precompiled"},
		{"normalizer", `{}`, "normalizer.type", ""},
		{"normalizer", `{"type":"NFC","strict":true}`, "normalizer.NFC.option", "strict"},
		{"normalizer", `{"type":"Sequence","normalizers":[],"mode":1}`, "normalizer.Sequence.option", "mode"},
		{"normalizer", `{"type":"Sequence","normalizers":[{"type":"Sequence","normalizers":[{"type":"Nmt"}]}]}`, "normalizer.type", "Nmt"},
		{"normalizer", `{"type":"Replace","pattern":{"String":""},"content":"x"}`, "normalizer.Replace.pattern.String", ""},
		{"normalizer", `{"type":"Replace","pattern":{"Regex":"\\w"},"content":"x"}`, "normalizer.Replace.pattern.Regex", `\w`},
		{"pre_tokenizer", `{"type":"Whitespace"}`, "pre_tokenizer.type", "Whitespace"},
		{"pre_tokenizer", `{"type":"Split","pattern":{"String":"x"},"behavior":"isolated","invert":false}`, "pre_tokenizer.Split.behavior", "isolated"},
		{"pre_tokenizer", `{"type":"Split","pattern":{"Regex":"a++"},"behavior":"Isolated","invert":false}`, "pre_tokenizer.Split.pattern.Regex", "a++"},
		{"pre_tokenizer", `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"cased":true}`, "pre_tokenizer.ByteLevel.option", "cased"},
		{"pre_tokenizer", `{"type":"Digits","individual_digits":true,"base":16}`, "pre_tokenizer.Digits.option", "base"},
		{"pre_tokenizer", `{"type":"Metaspace","replacement":"▁","prepend_scheme":"last"}`, "pre_tokenizer.Metaspace.prepend_scheme", "last"},
		{"post_processor", `{"type":"RobertaProcessing"}`, "post_processor.type", "RobertaProcessing"},
		{"post_processor", `{"type":"ByteLevel","add_prefix_space":false,"mode":1}`, "post_processor.ByteLevel.option", "mode"},
		{"post_processor", `{"type":"Sequence","processors":[` + oneTemplate + `,` + oneTemplate + `]}`, "post_processor.Sequence", "TemplateProcessing"},
		{"decoder", `{"type":"WordPiece","prefix":"##","cleanup":true}`, "decoder.type", "WordPiece"},
		{"decoder", `{"type":"BPEDecoder","suffix":"</w>"}`, "decoder.type", "BPEDecoder"},
		{"decoder", `{"type":"Replace","pattern":{"Regex":"a"},"content":"b"}`, "decoder.Replace.pattern.Regex", "a"},
		{"decoder", `{"type":"Sequence","decoders":[` + byteLevel + `,{"type":"ByteFallback"}]}`, "decoder.Sequence", "ByteFallback"},
		{"decoder", `{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Replace","pattern":{"String":"a"},"content":"b"}]}`, "decoder.Sequence", "Replace"},
		{"decoder", `{"type":"ByteFallback","lossy":true}`, "decoder.ByteFallback.option", "lossy"},
	} {
		_, err := New(patched(t, "byte_level.json", c.path, c.value))
		var unsupported *UnsupportedError
		if !errors.As(err, &unsupported) {
			t.Errorf("%s %s: %v, want an UnsupportedError", c.path, c.value, err)
			continue
		}
		if unsupported.Component != c.component || unsupported.Value != c.badValue {
			t.Errorf("%s %s: got %s %q, want %s %q", c.path, c.value, unsupported.Component, unsupported.Value, c.component, c.badValue)
		}
	}
}

const oneTemplate = `{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{}}`

func TestMalformed(t *testing.T) {
	deep := strings.Repeat(`{"type":"Sequence","normalizers":[`, 30) + strings.Repeat(`]}`, 30)
	template := func(single string) string {
		return `{"type":"TemplateProcessing","single":` + single + `,"pair":[],"special_tokens":{"<x>":{"id":"<x>","ids":[9999],"tokens":["<x>"]}}}`
	}
	for _, c := range []struct{ path, value, component string }{
		{"added_tokens", `{}`, ""},
		{"model.vocab", ``, "model.vocab"},
		{"model.vocab", `{"a":-1}`, ""},
		{"model.vocab", `{"a":1.5}`, ""},
		{"model.vocab", `{"a":16777216}`, "model.vocab"},
		{"model.merges", ``, "model.merges"},
		{"model.merges", `["a"]`, "model.merges"},
		{"model.merges", `["a b c"]`, "model.merges"},
		{"model.merges", `[["a","b","c"]]`, "model.merges"},
		{"model.merges", `[["a","no such token"]]`, "model.merges"},
		{"model.merges", `7`, "model.merges"},
		{"added_tokens", `[{"id":311,"content":"new"}]`, "added_tokens"},
		{"added_tokens", `[{"id":313,"content":"new"}]`, "added_tokens"},
		{"added_tokens", `[{"id":5,"content":"!"}]`, "added_tokens"},
		{"added_tokens", `[{"id":312,"content":"x"},{"id":312,"content":"x"}]`, "added_tokens"},
		{"added_tokens", `[{"id":1000000,"content":"far"}]`, "model.vocab"},
		{"normalizer", `7`, "normalizer"},
		{"normalizer", `{"type":"Sequence"}`, "normalizer.normalizers"},
		{"normalizer", deep, "normalizer"},
		{"normalizer", `{"type":"Prepend"}`, "normalizer.Prepend"},
		{"normalizer", `{"type":"Replace","pattern":{"String":"x"}}`, "normalizer.Replace"},
		{"normalizer", `{"type":"Replace","pattern":{},"content":""}`, "normalizer.Replace.pattern"},
		{"normalizer", `{"type":"Replace","pattern":{"Regex":"(a"},"content":""}`, "normalizer.Replace.pattern.Regex"},
		{"pre_tokenizer", `{"type":"Split","behavior":"Isolated","invert":false}`, "pre_tokenizer.Split.pattern"},
		{"pre_tokenizer", `{"type":"ByteLevel","trim_offsets":true}`, "pre_tokenizer.ByteLevel"},
		{"pre_tokenizer", `{"type":"Metaspace","replacement":"ab"}`, "pre_tokenizer.Metaspace.replacement"},
		{"pre_tokenizer", `{"type":"Metaspace","replacement":"a","prepend_scheme":"first","add_prefix_space":false}`, "pre_tokenizer.Metaspace"},
		{"post_processor", template(`[]`), "post_processor.TemplateProcessing.single"},
		{"post_processor", template(`[{"Sequence":{"id":"B","type_id":0}}]`), "post_processor.TemplateProcessing.single"},
		{"post_processor", template(`[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"A","type_id":0}}]`), "post_processor.TemplateProcessing.single"},
		{"post_processor", template(`[{}]`), "post_processor.TemplateProcessing.single"},
		{"post_processor", template(`[{"SpecialToken":{"id":"<y>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}]`), "post_processor.TemplateProcessing"},
		{"post_processor", template(`[{"SpecialToken":{"id":"<x>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}]`), "post_processor"},
		{"decoder", `{"type":"Strip","content":"","start":1,"stop":0}`, "decoder.Strip.content"},
		{"decoder", `{"type":"Strip","content":" ","start":-1,"stop":0}`, "decoder.Strip"},
	} {
		_, err := New(patched(t, "byte_level.json", c.path, c.value))
		var format *FormatError
		if !errors.As(err, &format) {
			t.Errorf("%s %s: %v, want a FormatError", c.path, c.value, err)
			continue
		}
		if format.Component != c.component {
			t.Errorf("%s %s: component %q, want %q (%v)", c.path, c.value, format.Component, c.component, err)
		}
	}
	for _, text := range []string{"", "null", "[]", "{", `{"version":"1.0","version":"1.0"}`, "{\"version\":\"\xff\"}",
		`{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":0},"merges":[]}}`,
		`{"version":"1.0","model":{"type":"BPE","vocab":{"\ud800":0},"merges":[]}}`} {
		if _, err := New([]byte(text)); err == nil {
			t.Errorf("New(%q) succeeds", text)
		}
	}
}

func TestAccepted(t *testing.T) {
	for _, c := range []struct{ path, value string }{
		{"padding", `{"strategy":"BatchLongest","direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,"pad_token":"x"}`},
		{"model.dropout", `0`},
		{"model.end_of_word_suffix", `""`},
		{"model.ignore_merges", `null`},
		{"model.merges", `["#version: 0.2","Ġ t"]`},
		{"pre_tokenizer", `{"type":"Metaspace","replacement":"▁","add_prefix_space":true,"str_rep":"▁"}`},
		{"post_processor", `null`},
		{"post_processor", oneTemplate},
		{"normalizer", `{"type":"Sequence","normalizers":[]}`},
	} {
		if _, err := New(patched(t, "byte_level.json", c.path, c.value)); err != nil {
			t.Errorf("%s %s: %v", c.path, c.value, err)
		}
	}
}

// FuzzNew reads any bytes as a tokenizer.json: it must be read or refused, and what is read must encode and decode.
func FuzzNew(f *testing.F) {
	f.Add(tinyFile("[]", "null", "null", `{"type":"ByteLevel"}`), "ab\xff cd")
	short := defaultLimits()
	short.search, short.text = 10*time.Millisecond, 20*time.Millisecond
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		tok, err := newTokenizer(data, short)
		if err != nil {
			var unsupported *UnsupportedError
			var format *FormatError
			if !errors.As(err, &unsupported) && !errors.As(err, &format) && !errors.Is(err, ErrTooSlow) {
				t.Errorf("untyped error: %v", err)
			}
			return
		}
		ids, err := tok.Encode(text, true)
		if err != nil {
			return
		}
		for _, skip := range []bool{true, false} {
			if got, want := streamed(t, tok, ids, skip), tok.Decode(ids, skip); got != want {
				t.Errorf("streamed %q, decoded %q", got, want)
			}
		}
	})
}

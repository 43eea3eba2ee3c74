package tokenize

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// stageOutput runs tokens through a decoder and returns what comes out after each, and at the end.
func stageOutput(t *testing.T, decoder string, tokens []string) []string {
	t.Helper()
	stages, err := buildDecoder([]byte(decoder))
	if err != nil {
		t.Fatal(err)
	}
	s := (&Tokenizer{decoder: stages}).NewStream(false)
	var out []string
	for _, token := range tokens {
		s.run(0, token)
		out = append(out, s.take())
	}
	return append(out, s.Flush())
}

func TestDecoders(t *testing.T) {
	const byteLevel = `{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}`
	const fallback = `{"type":"ByteFallback"}`
	strip := func(start, stop int) string {
		return fmt.Sprintf(`{"type":"Strip","content":" ","start":%d,"stop":%d}`, start, stop)
	}
	fused := func(members string) string { return `{"type":"Sequence","decoders":[{"type":"Fuse"},` + members + `]}` }
	metaspace := func(scheme string) string {
		return fmt.Sprintf(`{"type":"Metaspace","replacement":"▁","prepend_scheme":%q,"split":true}`, scheme)
	}
	for _, c := range []struct {
		decoder string
		tokens  string // separated by |
		want    string // after each token and at the end
	}{
		{"null", "a|b|c", "a| b| c|"},
		{byteLevel, "Ġa|Ã|©|x", " a||é|x|"},
		{byteLevel, "ðŁ|ĺ|a|Ģ", "||\uFFFDa|\uFFFD|"},
		{byteLevel, "a|ðŁ|ĺ", "a|||\uFFFD"},
		{byteLevel, "Ã|<｜x｜>|a", "|\uFFFD<｜x｜>|a|"},
		{fallback, "<0xC3>|<0xA9>|a", "||éa|"},
		{fallback, "<0x41>|<0xC3>|b", "||\uFFFD\uFFFDb|"},
		{fallback, "<0x41>|<0xFF>|<0x42>|b", "|\uFFFD\uFFFD|\uFFFD|b|"},
		{fallback, "<0xe6>|<0x97>|<0xA5>", "|||日"},
		{fallback, "<0xE6>|<0x97>", "||\uFFFD\uFFFD"},
		{fallback, "<0xZZ>|<0x1>|x<0x41>|<0xA_>", "<0xZZ>|<0x1>|x<0x41>|<0xA_>|"},
		{`{"type":"Replace","pattern":{"String":"▁"},"content":" "}`, "▁a▁|▁", " a | |"},
		{strip(1, 0), "  a| b|c", " a|b|c|"},
		{strip(1, 2), " a   |  |b ", "a ||b|"},
		{fused(strip(1, 0)), " | a|  b", "| a|  b|"},
		{fused(strip(2, 0)), " | | a|  b", "|| a|  b|"},
		{fused(strip(0, 1)), "a | |b |", "a| | b||"},
		{fused(strip(1, 2)), "  |  ", "| |"},
		{fused(`{"type":"Fuse"},` + strip(1, 0)), " a", "a|"},
		{metaspace("always"), "▁▁a▁b|▁c", "ab| c|"},
		{metaspace("never"), "▁a|▁c", " a| c|"},
		{`{"type":"Sequence","decoders":[` + metaspace("first") + `,` + fallback + `]}`, "▁|<0x20>|▁a", "||  a|"},
	} {
		got := stageOutput(t, c.decoder, strings.Split(c.tokens, "|"))
		if s := strings.Join(got, "|"); s != c.want {
			t.Errorf("%s of %s\n got %q\nwant %q", c.decoder, c.tokens, s, c.want)
		}
	}
}

// TestByteLevelHoldsBackLittle: what a stream keeps does not grow.
func TestByteLevelHoldsBackLittle(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	s := &byteLevelStage{}
	for range 100_000 {
		s.push(byteChars[rng.IntN(256)], func(text string) {
			if !utf8.ValidString(text) {
				t.Errorf("emits %q", text)
			}
		})
		if len(s.rest) >= utf8.UTFMax {
			t.Fatalf("holds %q back", s.rest)
		}
	}
}

// decoderVariants are decoders of every kind for the tokens of byte_fallback.json.
var decoderVariants = []string{
	"null",
	`{"type":"Fuse"}`,
	`{"type":"ByteFallback"}`,
	`{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Metaspace","replacement":"▁","prepend_scheme":"always"}]}`,
	`{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":2,"stop":3}]}`,
	`{"type":"Sequence","decoders":[{"type":"Strip","content":"▁","start":1,"stop":1},{"type":"ByteLevel","add_prefix_space":false},{"type":"Strip","content":"l","start":1,"stop":2}]}`,
}

// TestByteFallbackByDefinition compares with the stage's definition on random runs of byte tokens.
func TestByteFallbackByDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	for range 3000 {
		var tokens []string
		var want strings.Builder
		for range 1 + rng.IntN(4) {
			run := []byte(randomText(rng, 6))
			for range rng.IntN(3) {
				if len(run) > 0 {
					run[rng.IntN(len(run))] = byte(rng.IntN(256))
				}
			}
			for _, b := range run {
				tokens = append(tokens, fmt.Sprintf("<0x%02X>", b))
			}
			if utf8.Valid(run) {
				want.Write(run)
			} else {
				want.WriteString(strings.Repeat("\uFFFD", len(run)))
			}
			tokens = append(tokens, "|")
			want.WriteString("|")
		}
		got := stageOutput(t, `{"type":"ByteFallback"}`, tokens)
		if !slices.ContainsFunc(got, func(s string) bool { return !utf8.ValidString(s) }) && strings.Join(got, "") == want.String() {
			continue
		}
		t.Fatalf("%s\n got %q\nwant %q", tokens, got, want.String())
	}
}

func TestStreamEqualsDecode(t *testing.T) {
	var toks []*Tokenizer
	for _, name := range testFiles {
		toks = append(toks, load(t, name))
	}
	for _, decoder := range decoderVariants {
		toks = append(toks, loadPatched(t, "byte_fallback.json", "decoder", decoder))
	}
	rng := rand.New(rand.NewPCG(15, 16))
	for i, tok := range toks {
		for range 300 {
			ids := make([]int32, rng.IntN(30))
			for j := range ids {
				ids[j] = int32(rng.IntN(tok.VocabSize()+4) - 2)
			}
			for _, skip := range []bool{true, false} {
				if got, want := streamed(t, tok, ids, skip), tok.Decode(ids, skip); got != want {
					t.Fatalf("tokenizer %d, %v, skip %v: streamed %q, decoded %q", i, ids, skip, got, want)
				}
			}
		}
	}
}

// TestStreamIsReusable: a flushed stream begins anew.
func TestStreamIsReusable(t *testing.T) {
	tok := load(t, "byte_fallback.json")
	ids, err := tok.Encode(" hello 日", true)
	if err != nil {
		t.Fatal(err)
	}
	ids = ids[:len(ids)-2] // the last character stays unfinished
	s := tok.NewStream(true)
	for range 3 {
		var got strings.Builder
		for _, id := range ids {
			got.WriteString(s.Push(id))
		}
		got.WriteString(s.Flush())
		if want := tok.Decode(ids, true); got.String() != want {
			t.Errorf("got %q, want %q", got.String(), want)
		}
	}
}

// TestStreamAcrossSpecialTokens: a skipped token does not cut a character in two, a kept one does.
func TestStreamAcrossSpecialTokens(t *testing.T) {
	tok := load(t, "byte_level.json")
	ids, err := tok.Encode("日", false)
	if err != nil {
		t.Fatal(err)
	}
	if len(ids) < 2 {
		t.Fatalf("%v: want a character of several tokens", ids)
	}
	bos, _ := tok.TokenID("<|bos|>")
	ids = slices.Insert(ids, 1, bos)
	if got := streamed(t, tok, ids, true); got != "日" {
		t.Errorf("skipped: %q, want 日", got)
	}
	if got, want := streamed(t, tok, ids, false), "\uFFFD<|bos|>\uFFFD\uFFFD"; got != want {
		t.Errorf("kept: %q, want %q", got, want)
	}
}

// FuzzStream decodes random ids, two bytes each.
func FuzzStream(f *testing.F) {
	var toks []*Tokenizer
	for _, name := range testFiles {
		toks = append(toks, load(f, name))
	}
	for _, decoder := range decoderVariants {
		toks = append(toks, loadPatched(f, "byte_fallback.json", "decoder", decoder))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, tok := range toks {
			var ids []int32
			for i := 0; i+1 < len(data); i += 2 {
				ids = append(ids, (int32(data[i])<<8|int32(data[i+1]))%int32(tok.VocabSize()+1))
			}
			for _, skip := range []bool{true, false} {
				if got, want := streamed(t, tok, ids, skip), tok.Decode(ids, skip); got != want {
					t.Errorf("%v, skip %v: streamed %q, decoded %q", ids, skip, got, want)
				}
			}
		}
	})
}

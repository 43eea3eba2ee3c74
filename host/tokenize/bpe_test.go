package tokenize

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
)

// naiveMerge merges the pair of the lowest rank, the leftmost first, until there is none.
func naiveMerge(m *bpe, ids []int32) []int32 {
	for {
		best, at := merge{rank: 1 << 30}, -1
		for i := range len(ids) - 1 {
			if found, ok := m.merges[tokenPair{ids[i], ids[i+1]}]; ok && found.rank < best.rank {
				best, at = found, i
			}
		}
		if at < 0 {
			return ids
		}
		ids = slices.Replace(ids, at, at+2, best.id)
	}
}

// TestMergeOrder compares with the naive merging on random vocabularies in which each token is made by one pair only.
func TestMergeOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	for range 200 {
		m := &bpe{vocab: map[string]int32{"a": 0, "b": 1, "c": 2}, unk: noToken, cache: newWordCache()}
		tokens := []string{"a", "b", "c"}
		var pairs [][2]string
		for range rng.IntN(30) {
			left, right := tokens[rng.IntN(len(tokens))], tokens[rng.IntN(len(tokens))]
			if _, ok := m.vocab[left+right]; ok {
				continue
			}
			m.vocab[left+right] = int32(len(tokens))
			tokens = append(tokens, left+right)
			pairs = append(pairs, [2]string{left, right})
		}
		rng.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
		if err := m.addMerges(pairs); err != nil {
			t.Fatal(err)
		}
		for range 20 {
			var word strings.Builder
			var ids []int32
			for range 1 + rng.IntN(40) {
				id := int32(rng.IntN(3))
				ids = append(ids, id)
				word.WriteString(tokens[id])
			}
			want := naiveMerge(m, ids)
			for range 2 { // the second time from the cache
				got, err := m.appendTokens(nil, word.String(), newWork())
				if err != nil || !slices.Equal(got, want) {
					t.Fatalf("%s with %q: %v, %v, want %v", word.String(), pairs, got, err, want)
				}
			}
		}
	}
}

func TestUnknownCharacters(t *testing.T) {
	model := func(options string) string {
		return `{"type":"BPE",` + options + `"vocab":{"a":0,"b":1,"<unk>":2,"<0xC3>":3,"<0xA9>":4},"merges":[]}`
	}
	for _, c := range []struct {
		options, text string
		want          []int32
	}{
		{``, "axéb", []int32{0, 1}}, // without an unknown token they are dropped
		{`"unk_token":"<unk>",`, "axyb", []int32{0, 2, 2, 1}},
		{`"unk_token":"<unk>","fuse_unk":true,`, "axybx", []int32{0, 2, 1, 2}},
		{`"unk_token":"<unk>","byte_fallback":true,`, "aéü", []int32{0, 3, 4, 2}},
		// The reference holds an unknown token back over byte tokens.
		{`"unk_token":"<unk>","byte_fallback":true,"fuse_unk":true,`, "xéxa", []int32{3, 4, 2, 0}},
	} {
		tok, err := New([]byte(`{"version":"1.0","model":` + model(c.options) + `}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tok.Encode(c.text, false); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s %q: %v, %v, want %v", c.options, c.text, got, err, c.want)
		}
	}
	tok, err := New([]byte(`{"version":"1.0","model":` + model(`"unk_token":"[UNK]",`) + `}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tok.Encode("ab", false); err != nil {
		t.Errorf("an unknown token that is not needed: %v", err)
	}
	var format *FormatError
	if _, err := tok.Encode("x", false); !errors.As(err, &format) || format.Component != "model.unk_token" {
		t.Errorf("a missing unknown token: %v, want a FormatError", err)
	}
}

func TestIgnoreMerges(t *testing.T) {
	const file = `{"version":"1.0","model":{"type":"BPE","ignore_merges":%v,"vocab":{"a":0,"b":1,"c":2,"abc":3,"ab":4},"merges":["a b"]}}`
	for ignore, want := range map[bool][]int32{true: {3}, false: {4, 2}} {
		tok, err := New(fmt.Appendf(nil, file, ignore))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tok.Encode("abc", false); err != nil || !slices.Equal(got, want) {
			t.Errorf("ignore_merges %v: %v, %v, want %v", ignore, got, err, want)
		}
	}
}

func TestWordCacheIsBounded(t *testing.T) {
	c := newWordCache()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 50_000 {
				word := fmt.Sprint(g, " ", i)
				c.put(word, []int32{int32(g), int32(i)})
				if ids, ok := c.get(word); ok && !slices.Equal(ids, []int32{int32(g), int32(i)}) {
					t.Errorf("%s: %v", word, ids)
				}
			}
		})
	}
	wg.Wait()
	total := 0
	for i := range c.shards {
		total += len(c.shards[i].words)
	}
	if total == 0 || total > cacheShards*cacheShardWords {
		t.Errorf("%d words kept, want up to %d", total, cacheShards*cacheShardWords)
	}
}

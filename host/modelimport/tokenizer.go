package modelimport

import (
	"encoding/json"
	"fmt"
	"sort"
	"strings"

	"github.com/mlxcel/mlxcel/host/gguf"
)

// Token types of tokenizer.ggml.token_type (llama.h: enum llama_token_type).
const (
	tokenNormal  = 1
	tokenUnknown = 2
	tokenControl = 3
	tokenUser    = 4
	tokenUnused  = 5
	tokenByte    = 6
)

// UnsupportedTokenizerError reports a vocabulary that can't be written as a tokenizer.json faithfully.
type UnsupportedTokenizerError struct {
	Key, Value string
}

func (e *UnsupportedTokenizerError) Error() string {
	return fmt.Sprintf("%s is %q, which is not known here; give the model folder the tokenizer.json of the original repository", e.Key, e.Value)
}

// vocabulary is what a GGUF file says of its tokenizer.
type vocabulary struct {
	model, pre         string
	tokens             []string
	types              []int64
	scores             []float64
	merges             []string
	bos, eos, eot, unk int64 // -1 where absent
	addBOS, addEOS     bool
	addSpacePrefix     bool
	template           string
}

const (
	keyModel  = "tokenizer.ggml.model"
	keyPre    = "tokenizer.ggml.pre"
	keyTokens = "tokenizer.ggml.tokens"
	keyTypes  = "tokenizer.ggml.token_type"
)

func readVocabulary(f *gguf.File) (*vocabulary, error) {
	v := &vocabulary{model: f.String(keyModel), pre: f.String(keyPre), template: f.String("tokenizer.chat_template")}
	v.tokens, _ = f.Metadata[keyTokens].([]string)
	v.types, _ = f.Metadata[keyTypes].([]int64)
	v.scores, _ = f.Metadata["tokenizer.ggml.scores"].([]float64)
	v.merges, _ = f.Metadata["tokenizer.ggml.merges"].([]string)
	if len(v.tokens) == 0 {
		return nil, fmt.Errorf("%s has no %s: the file carries no vocabulary", f.Path, keyTokens)
	}
	if len(v.types) != 0 && len(v.types) != len(v.tokens) {
		return nil, fmt.Errorf("%s: %s has %d entries for %d tokens", f.Path, keyTypes, len(v.types), len(v.tokens))
	}
	id := func(key string) (int64, error) {
		n, ok := f.Int("tokenizer.ggml." + key)
		if !ok {
			return -1, nil
		}
		if n < 0 || n >= int64(len(v.tokens)) {
			return 0, fmt.Errorf("%s: tokenizer.ggml.%s is %d, outside of the vocabulary of %d", f.Path, key, n, len(v.tokens))
		}
		return n, nil
	}
	for _, e := range []struct {
		key string
		to  *int64
	}{{"bos_token_id", &v.bos}, {"eos_token_id", &v.eos}, {"eot_token_id", &v.eot}, {"unknown_token_id", &v.unk}} {
		var err error
		if *e.to, err = id(e.key); err != nil {
			return nil, err
		}
	}
	flag := func(key string, def bool) bool {
		if b, ok := f.Metadata["tokenizer.ggml."+key].(bool); ok {
			return b
		}
		return def
	}
	sentencePiece := v.model == "llama"
	v.addBOS = flag("add_bos_token", sentencePiece || byteLevelPre[v.pre].bos)
	v.addEOS = flag("add_eos_token", false)
	v.addSpacePrefix = flag("add_space_prefix", sentencePiece)
	return v, nil
}

func (v *vocabulary) kind(id int) int64 {
	if id < len(v.types) {
		return v.types[id]
	}
	return tokenNormal
}

// object keeps tokenizer.json's nodes readable where they are built.
type object = map[string]any

// byteLevel is how one of llama.cpp's named pre-tokenizers is written in a tokenizer.json, as the models that
// carry the name spell it themselves.
type byteLevel struct {
	split        string // pattern of a Split before ByteLevel; empty leaves the splitting to ByteLevel
	digits       bool   // each digit alone, before ByteLevel
	nfc          bool   // text is normalized to NFC
	ignoreMerges bool
	bos          bool // a BOS is added unless the file says otherwise
}

const (
	splitLlama3 = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	splitQwen2  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	splitTekken = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

var byteLevelPre = map[string]byteLevel{
	"gpt-2":     {},
	"smollm":    {digits: true},
	"llama-bpe": {split: splitLlama3, ignoreMerges: true, bos: true},
	"llama3":    {split: splitLlama3, ignoreMerges: true, bos: true},
	"qwen2":     {split: splitQwen2, nfc: true},
	"tekken":    {split: splitTekken, ignoreMerges: true, bos: true},
}

// tokenizerJSON writes the vocabulary in the Hugging Face tokenizers library's format.
func (v *vocabulary) tokenizerJSON() ([]byte, error) {
	out := object{"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil, "added_tokens": v.addedTokens()}
	var err error
	switch v.model {
	case "gpt2":
		err = v.byteLevel(out)
	case "llama":
		err = v.sentencePiece(out)
	default:
		err = &UnsupportedTokenizerError{keyModel, v.model}
	}
	if err != nil {
		return nil, err
	}
	return json.MarshalIndent(out, "", " ")
}

// addedTokens lists what is matched in the text before anything else.
func (v *vocabulary) addedTokens() []object {
	list := []object{}
	for id, t := range v.tokens {
		switch k := v.kind(id); k {
		case tokenControl, tokenUser, tokenUnknown:
			list = append(list, object{
				"id": id, "content": t, "special": k != tokenUser,
				"single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
			})
		}
	}
	return list
}

func (v *vocabulary) byteLevel(out object) error {
	pre, ok := byteLevelPre[v.pre]
	if !ok {
		return &UnsupportedTokenizerError{keyPre, v.pre}
	}
	level := func(regex bool) object {
		return object{"type": "ByteLevel", "add_prefix_space": v.addSpacePrefix, "trim_offsets": true, "use_regex": regex}
	}
	steps := []object{}
	if pre.digits {
		steps = append(steps, object{"type": "Digits", "individual_digits": true})
	}
	if pre.split != "" {
		steps = append(steps, object{"type": "Split", "pattern": object{"Regex": pre.split}, "behavior": "Isolated", "invert": false})
	}
	steps = append(steps, level(pre.split == ""))
	if pre.nfc {
		out["normalizer"] = object{"type": "NFC"}
	}
	out["pre_tokenizer"] = object{"type": "Sequence", "pretokenizers": steps}
	out["decoder"] = level(true)
	out["post_processor"] = v.postProcessor(level(true))
	out["model"] = v.bpe(v.merges, object{"ignore_merges": pre.ignoreMerges})
	return nil
}

// sentencePiece writes a SentencePiece BPE vocabulary as transformers converts it: the merges follow from the
// scores (convert_slow_tokenizer.py, generate_merges).
func (v *vocabulary) sentencePiece(out object) error {
	if len(v.scores) != len(v.tokens) {
		return fmt.Errorf("tokenizer.ggml.scores has %d entries for %d tokens", len(v.scores), len(v.tokens))
	}
	const space = "▁"
	normalizers := []object{{"type": "Replace", "pattern": object{"String": " "}, "content": space}}
	decoders := []object{
		{"type": "Replace", "pattern": object{"String": space}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
	}
	if v.addSpacePrefix {
		normalizers = append([]object{{"type": "Prepend", "prepend": space}}, normalizers...)
		decoders = append(decoders, object{"type": "Strip", "content": " ", "start": 1, "stop": 0})
	}
	out["normalizer"] = object{"type": "Sequence", "normalizers": normalizers}
	out["pre_tokenizer"] = nil
	out["decoder"] = object{"type": "Sequence", "decoders": decoders}
	out["post_processor"] = v.postProcessor(nil)
	out["model"] = v.bpe(v.mergesFromScores(), object{"byte_fallback": true, "fuse_unk": true})
	return nil
}

func (v *vocabulary) bpe(merges []string, with object) object {
	vocab := make(map[string]int, len(v.tokens))
	for id, t := range v.tokens {
		vocab[t] = id
	}
	m := object{
		"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
		"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": pairs(merges),
	}
	for k, val := range with {
		m[k] = val
	}
	if m["byte_fallback"] == true && v.unk >= 0 {
		m["unk_token"] = v.tokens[v.unk]
	}
	return m
}

// pairs splits "a b" merges. Tokens may hold spaces of their own in no vocabulary that is written this way.
func pairs(merges []string) [][2]string {
	out := make([][2]string, 0, len(merges))
	for _, m := range merges {
		a, b, _ := strings.Cut(m, " ")
		out = append(out, [2]string{a, b})
	}
	return out
}

func (v *vocabulary) mergesFromScores() []string {
	ids := make(map[string]int, len(v.tokens))
	for id, t := range v.tokens {
		if k := v.kind(id); k == tokenNormal || k == tokenUser || k == tokenUnused {
			ids[t] = id
		}
	}
	type merge struct {
		whole, left, right int
		text               string
	}
	var all []merge
	for t, id := range ids {
		for cut := range t {
			l, ok1 := ids[t[:cut]]
			r, ok2 := ids[t[cut:]]
			if cut > 0 && ok1 && ok2 {
				all = append(all, merge{id, l, r, t[:cut] + " " + t[cut:]})
			}
		}
	}
	sort.Slice(all, func(i, j int) bool {
		a, b := all[i], all[j]
		if a.whole != b.whole {
			if sa, sb := v.scores[a.whole], v.scores[b.whole]; sa != sb {
				return sa > sb
			}
			return a.whole < b.whole
		}
		return a.left < b.left || a.left == b.left && a.right < b.right
	})
	out := make([]string, len(all))
	for i, m := range all {
		out[i] = m.text
	}
	return out
}

// postProcessor returns the post-processor that adds BOS and EOS to one text; without either, plain.
func (v *vocabulary) postProcessor(plain object) any {
	var single []object
	special := object{}
	add := func(id int64) {
		t := v.tokens[id]
		single = append(single, object{"SpecialToken": object{"id": t, "type_id": 0}})
		special[t] = object{"id": t, "ids": []int64{id}, "tokens": []string{t}}
	}
	if v.addBOS && v.bos >= 0 {
		add(v.bos)
	}
	single = append(single, object{"Sequence": object{"id": "A", "type_id": 0}})
	if v.addEOS && v.eos >= 0 {
		add(v.eos)
	}
	if len(single) == 1 {
		if plain == nil {
			return nil
		}
		return plain
	}
	pair := append(append([]object{}, single...), object{"Sequence": object{"id": "B", "type_id": 1}})
	return object{"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
}

// tokenizerConfig writes tokenizer_config.json: the special tokens that a chat template may name.
func (v *vocabulary) tokenizerConfig(contextLength int64) ([]byte, error) {
	c := object{"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": v.addBOS, "add_eos_token": v.addEOS, "clean_up_tokenization_spaces": false}
	if contextLength > 0 {
		c["model_max_length"] = contextLength
	}
	for name, id := range map[string]int64{"bos_token": v.bos, "eos_token": v.eos, "unk_token": v.unk} {
		if id >= 0 {
			c[name] = v.tokens[id]
		}
	}
	return json.MarshalIndent(c, "", "  ")
}

package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

// This file knows how llama.cpp's converter wrote llama models into GGUF (gguf-py/gguf/constants.py for keys and names,
// conversion of LlamaModel for the row order).

// ggufModules maps tensor names, without block and suffix, to module paths.
var (
	ggufModules = map[string]string{
		"token_embd": embedPath, "output_norm": "model.norm", "output": headPath,
	}
	ggufBlockModules = map[string]string{
		"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
		"attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
		"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
	}
	ggufBlock = regexp.MustCompile(`^blk\.(\d+)\.([a-z_]+)\.(weight|bias)$`)
	ggufOuter = regexp.MustCompile(`^([a-z_]+)\.(weight|bias)$`)
)

// importLlama plans the model folder of a GGUF of architecture llama.
func importLlama(req *sdk.ImportRequest) (*sdk.ImportPlan, error) {
	m := &metadata{values: req.Metadata, prefix: req.Architecture + "."}
	c := readGGUF(m, req.Tensors)
	if err := m.err(); err != nil {
		return nil, err
	}
	plan := &sdk.ImportPlan{Family: "llama"}
	for i := range req.Tensors {
		t, err := c.target(&req.Tensors[i])
		if err != nil {
			return nil, err
		}
		plan.Tensors = append(plan.Tensors, *t)
	}
	raw, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("writing the config: %w", err)
	}
	plan.Config = append(raw, '\n')
	return plan, nil
}

// ggufConfig is the config.json that the import writes. Floats are float32, as in the container, so that 1e-05 is written
// and not 9.999999747378752e-06.
type ggufConfig struct {
	Architectures         []string    `json:"architectures"`
	ModelType             string      `json:"model_type"`
	HiddenSize            int         `json:"hidden_size"`
	IntermediateSize      int         `json:"intermediate_size"`
	NumHiddenLayers       int         `json:"num_hidden_layers"`
	NumAttentionHeads     int         `json:"num_attention_heads"`
	NumKeyValueHeads      int         `json:"num_key_value_heads"`
	HeadDim               int         `json:"head_dim"`
	VocabSize             int         `json:"vocab_size"`
	MaxPositionEmbeddings int         `json:"max_position_embeddings"`
	RMSNormEps            float32     `json:"rms_norm_eps"`
	RopeTheta             float32     `json:"rope_theta"`
	RopeScaling           *ggufRoPE   `json:"rope_scaling"`
	AttentionBias         bool        `json:"attention_bias"`
	MLPBias               bool        `json:"mlp_bias"`
	TieWordEmbeddings     bool        `json:"tie_word_embeddings"`
	HiddenAct             string      `json:"hidden_act"`
	BOS                   json.Number `json:"bos_token_id,omitempty"`
	EOS                   json.Number `json:"eos_token_id,omitempty"`
	PAD                   json.Number `json:"pad_token_id,omitempty"`
}

type ggufRoPE struct {
	Type            string  `json:"rope_type"`
	Factor          float32 `json:"factor"`
	OriginalContext int     `json:"original_max_position_embeddings,omitempty"`
}

// readGGUF turns metadata into a config. Faults are recorded in m.
func readGGUF(m *metadata, tensors []sdk.ImportTensor) *ggufConfig {
	c := &ggufConfig{
		Architectures: []string{"LlamaForCausalLM"}, ModelType: "llama", HiddenAct: "silu",
		HiddenSize: m.size("embedding_length"), IntermediateSize: m.size("feed_forward_length"), NumHiddenLayers: m.size("block_count"),
		NumAttentionHeads: m.size("attention.head_count"), MaxPositionEmbeddings: m.size("context_length"),
		RMSNormEps: m.float("attention.layer_norm_rms_epsilon", 0), RopeTheta: m.float("rope.freq_base", 10000),
		TieWordEmbeddings: find(tensors, "output.weight") == nil,
		AttentionBias:     find(tensors, "blk.0.attn_q.bias") != nil, MLPBias: find(tensors, "blk.0.ffn_up.bias") != nil,
		BOS: m.token("bos"), EOS: m.token("eos"), PAD: m.token("padding"),
	}
	c.NumKeyValueHeads = m.sizeOr("attention.head_count_kv", c.NumAttentionHeads)
	c.HeadDim = m.sizeOr("attention.key_length", c.HiddenSize/max(1, c.NumAttentionHeads))
	m.only("attention.value_length", c.HeadDim, "another size for values than for keys")
	m.only("rope.dimension_count", c.HeadDim, "partial rotation")
	m.only("expert_count", 0, "experts")
	m.only("expert_used_count", 0, "experts")
	m.sizeOr("vocab_size", 1)
	if e := find(tensors, "token_embd.weight"); e == nil || len(e.Shape) != 2 {
		m.fault("tensor token_embd.weight is missing or no matrix")
	} else {
		c.VocabSize = int(e.Shape[0])
	}
	if c.RMSNormEps <= 0 {
		m.fault("%sattention.layer_norm_rms_epsilon is missing or not above 0", m.prefix)
	}
	c.RopeScaling = readGGUFScaling(m)
	m.refuseOthers()
	return c
}

func readGGUFScaling(m *metadata) *ggufRoPE {
	kind := m.text("rope.scaling.type", "none")
	factor := m.float("rope.scaling.factor", 1)
	original := m.sizeOr("rope.scaling.original_context_length", 0)
	m.text("rope.scaling.finetuned", "") // how it was trained, not what is computed
	if f := m.float("rope.scaling.attn_factor", 1); f != 1 {
		m.fault("%srope.scaling.attn_factor is %v; built is 1", m.prefix, f)
	}
	switch {
	case kind == "none":
		return nil
	case kind == "linear":
		return &ggufRoPE{Type: kind, Factor: factor}
	case kind == "yarn" && original > 0:
		return &ggufRoPE{Type: kind, Factor: factor, OriginalContext: original}
	}
	m.fault("%srope.scaling.type is %q with an original context of %d; built are none, linear, and yarn with its original context", m.prefix, kind, original)
	return nil
}

// target says what becomes of one tensor.
func (c *ggufConfig) target(t *sdk.ImportTensor) (*sdk.ImportTarget, error) {
	if t.Name == "rope_freqs.weight" {
		return nil, &sdk.Error{Code: sdk.CodeUnsupported, Tensor: t.Name, Message: "tensor rope_freqs.weight: the container keeps llama3's rope factors but not the " +
			"settings they come from, which config.json needs; convert the original checkpoint with mlx_lm.convert instead"}
	}
	path, module, suffix := "", "", ""
	if b := ggufBlock.FindStringSubmatch(t.Name); b != nil {
		module, suffix = ggufBlockModules[b[2]], b[3]
		path = "model.layers." + b[1] + "." + module
	} else if o := ggufOuter.FindStringSubmatch(t.Name); o != nil {
		module, suffix = ggufModules[o[1]], o[2]
		path = module
	}
	if module == "" {
		return nil, &sdk.Error{Code: sdk.CodeUnsupported, Tensor: t.Name, Message: fmt.Sprintf("tensor %s (%s, %v) has no place in a llama model", t.Name, t.Type, t.Shape)}
	}
	out := &sdk.ImportTarget{Source: t.Name, Target: path, Suffix: "." + suffix}
	switch module {
	case "self_attn.q_proj":
		out.RowShape, out.RowPerm = c.unpermute(c.NumAttentionHeads)
	case "self_attn.k_proj":
		out.RowShape, out.RowPerm = c.unpermute(c.NumKeyValueHeads)
	}
	if rows := out.RowShape; rows != nil && int64(rows[0]*rows[1]*rows[2]) != t.Shape[0] {
		return nil, &sdk.Error{Code: sdk.CodeCorrupt, Tensor: t.Name, Message: fmt.Sprintf("tensor %s has %d rows, %d heads of %d ask for %d", t.Name, t.Shape[0], rows[0], c.HeadDim, rows[0]*c.HeadDim)}
	}
	return out, nil
}

// unpermute undoes the converter's order of the rows of q and k. It took each head's rows [2, dim/2], the halves that
// rotate against each other, and wrote them as [dim/2, 2], neighbours.
func (c *ggufConfig) unpermute(heads int) (shape, perm []int) {
	return []int{heads, c.HeadDim / 2, 2}, []int{0, 2, 1}
}

func find(tensors []sdk.ImportTensor, name string) *sdk.ImportTensor {
	for i := range tensors {
		if tensors[i].Name == name {
			return &tensors[i]
		}
	}
	return nil
}

// metadata reads a container's keys under the architecture's prefix, collects faults, and remembers what was read.
type metadata struct {
	values map[string]any
	prefix string
	read   []string
	faults []string
}

func (m *metadata) fault(format string, args ...any) {
	m.faults = append(m.faults, fmt.Sprintf(format, args...))
}

func (m *metadata) err() error {
	if len(m.faults) == 0 {
		return nil
	}
	return sdk.Errorf(sdk.CodeUnsupported, "can't import this container: %s", strings.Join(m.faults, "; "))
}

func (m *metadata) get(key string) any {
	m.read = append(m.read, m.prefix+key)
	return m.values[m.prefix+key]
}

// maxSize bounds sizes as config.json's reader does.
const maxSize = 1 << 31

func (m *metadata) size(key string) int {
	n := m.sizeOr(key, 0)
	if n == 0 {
		m.fault("%s%s is missing or 0", m.prefix, key)
		return 1
	}
	return n
}

// sizeOr reads a whole number, which may be 0.
func (m *metadata) sizeOr(key string, def int) int {
	v := m.get(key)
	if v == nil {
		return def
	}
	n, ok := whole(v)
	if !ok || n > maxSize {
		m.fault("%s%s is %v, want one whole number", m.prefix, key, v)
		return def
	}
	return n
}

func whole(v any) (int, bool) {
	switch v := v.(type) {
	case uint64:
		return int(v), v <= maxSize
	case int64:
		return int(v), v >= 0 && v <= maxSize
	}
	return 0, false
}

// only records a fault unless the key is absent or has that value.
func (m *metadata) only(key string, value int, meaning string) {
	if n := m.sizeOr(key, value); n != value {
		m.fault("%s%s is %d: %s is not built, want %d", m.prefix, key, n, meaning, value)
	}
}

func (m *metadata) float(key string, def float32) float32 {
	v := m.get(key)
	if v == nil {
		return def
	}
	f, ok := v.(float64)
	if !ok {
		m.fault("%s%s is %v, want a number", m.prefix, key, v)
		return def
	}
	return float32(f)
}

func (m *metadata) text(key, def string) string {
	switch v := m.get(key).(type) {
	case string:
		return v
	case bool:
		return fmt.Sprint(v)
	}
	return def
}

// token reads the id of a special token, empty if the container names none.
func (m *metadata) token(name string) json.Number {
	n, ok := whole(m.values["tokenizer.ggml."+name+"_token_id"])
	if !ok {
		return ""
	}
	return json.Number(fmt.Sprint(n))
}

// refuseOthers records the architecture's keys that nothing read: each may change what the model computes.
func (m *metadata) refuseOthers() {
	var others []string
	for key := range m.values {
		if strings.HasPrefix(key, m.prefix) && !slices.Contains(m.read, key) {
			others = append(others, key)
		}
	}
	if len(others) > 0 {
		slices.Sort(others)
		m.fault("keys that are not built: %s", strings.Join(others, ", "))
	}
}

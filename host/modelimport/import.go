// Package modelimport owns turning a foreign container into an MLX model folder. The container's bytes are read
// here; names, layouts and the config come from the family's executor.
package modelimport

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"

	"github.com/mlxcel/mlxcel/host/gguf"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// maxShardBytes is the size at which a new shard begins, as mlx-lm's MAX_FILE_SIZE_GB.
const maxShardBytes = 5 << 30

// maxMetadataArray is the longest metadata array that is handed to the executor: vocabularies stay here.
const maxMetadataArray = 256

// Planner is the part of an executor that an import needs.
type Planner interface {
	Import(ctx context.Context, req sdk.ImportRequest) (*sdk.ImportPlan, error)
}

// ExistsError reports a target folder that already holds something.
type ExistsError struct{ Dir string }

func (e *ExistsError) Error() string {
	return fmt.Sprintf("%s exists and is not empty; name another folder, or remove it first", e.Dir)
}

// Report says what an import wrote.
type Report struct {
	Family  string
	Tensors int
	Bytes   int64
	Skipped []string
}

// GGUF writes the model in f to the folder dir, which must not exist or be empty. The folder appears only when it is
// complete.
func GGUF(ctx context.Context, f *gguf.File, dir string, p Planner) (*Report, error) {
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return nil, &ExistsError{dir}
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	plan, err := p.Import(ctx, request(f))
	if err != nil {
		return nil, err
	}
	vocab, err := readVocabulary(f)
	if err != nil {
		return nil, err
	}
	parent := filepath.Dir(filepath.Clean(dir))
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(parent, ".import-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp) // after the rename there is nothing left to remove
	w := &writer{ctx: ctx, file: f, dir: tmp, plan: plan, vocab: vocab}
	report, err := w.write()
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return nil, err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) { // the empty folder
		return nil, err
	}
	return report, os.Rename(tmp, dir)
}

// request describes the container to the executor, without vocabularies and data.
func request(f *gguf.File) sdk.ImportRequest {
	req := sdk.ImportRequest{Format: "gguf", Architecture: f.Architecture(), Metadata: map[string]any{}}
	for k, v := range f.Metadata {
		if arrayLen(v) <= maxMetadataArray {
			req.Metadata[k] = v
		}
	}
	for _, t := range f.Tensors {
		req.Tensors = append(req.Tensors, sdk.ImportTensor{Name: t.Name, Type: t.Type.String(), Shape: t.Shape})
	}
	return req
}

func arrayLen(v any) int {
	switch v := v.(type) {
	case []string:
		return len(v)
	case []int64:
		return len(v)
	case []uint64:
		return len(v)
	case []float64:
		return len(v)
	case []bool:
		return len(v)
	}
	return 0
}

type writer struct {
	ctx   context.Context
	file  *gguf.File
	dir   string
	plan  *sdk.ImportPlan
	vocab *vocabulary
}

func (w *writer) write() (*Report, error) {
	tensors, quant, err := w.convert()
	if err != nil {
		return nil, err
	}
	total, err := w.weights(tensors)
	if err != nil {
		return nil, err
	}
	config, err := w.config(quant)
	if err != nil {
		return nil, err
	}
	tokenizer, err := w.vocab.tokenizerJSON()
	if err != nil {
		return nil, err
	}
	context, _ := w.file.Int(w.file.Architecture() + ".context_length")
	tokenizerConfig, err := w.vocab.tokenizerConfig(context)
	if err != nil {
		return nil, err
	}
	generation, err := json.MarshalIndent(w.specialIDs(), "", "  ")
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{
		"config.json": config, "generation_config.json": generation,
		"tokenizer.json": tokenizer, "tokenizer_config.json": tokenizerConfig,
	}
	if w.vocab.template != "" {
		files["chat_template.jinja"] = []byte(w.vocab.template)
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(w.dir, name), data, 0o644); err != nil {
			return nil, err
		}
	}
	return &Report{Family: w.plan.Family, Tensors: len(tensors), Bytes: total, Skipped: w.plan.Skipped}, nil
}

// specialIDs are generation_config.json's keys: every id that ends an answer.
func (w *writer) specialIDs() object {
	out := object{}
	if w.vocab.bos >= 0 {
		out["bos_token_id"] = w.vocab.bos
	}
	switch eos, eot := w.vocab.eos, w.vocab.eot; {
	case eos >= 0 && eot >= 0 && eos != eot:
		out["eos_token_id"] = []int64{eos, eot}
	case eos >= 0:
		out["eos_token_id"] = eos
	case eot >= 0:
		out["eos_token_id"] = eot
	}
	return out
}

// tensor is one entry of the folder's files; size is in bytes.
type tensor struct {
	safetensors.Entry
	size int64
}

// quantization maps a module's path to its affine width; 0 is a matrix that stays plain.
type quantization map[string]int

func (w *writer) convert() ([]tensor, quantization, error) {
	sources := map[string]gguf.Tensor{}
	for _, t := range w.file.Tensors {
		sources[t.Name] = t
	}
	var out []tensor
	quant := quantization{}
	for _, target := range w.plan.Tensors {
		src, ok := sources[target.Source]
		if !ok {
			return nil, nil, fmt.Errorf("%s has no tensor %s, which becomes %s%s", w.file.Path, target.Source, target.Target, target.Suffix)
		}
		entries, err := w.entries(src, target)
		if err != nil {
			return nil, nil, err
		}
		out = append(out, entries...)
		if len(src.Shape) == 2 {
			quant[target.Target] = src.Type.AffineBits()
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Name < out[j].Name })
	return out, quant, nil
}

func (w *writer) entries(src gguf.Tensor, target sdk.ImportTarget) ([]tensor, error) {
	if dtype := src.Type.SafetensorsDtype(); dtype != "" {
		return []tensor{{size: src.Size, Entry: safetensors.Entry{
			Name: target.Target + target.Suffix, Dtype: dtype, Shape: src.Shape,
			Write: func(out io.Writer) error { return w.copyPlain(out, src, target) },
		}}}, nil
	}
	bits := int64(src.Type.AffineBits())
	if bits == 0 || len(src.Shape) != 2 {
		return nil, &gguf.UnsupportedTypeError{Tensor: src.Name, Type: src.Type}
	}
	rows, cols := src.Shape[0], src.Shape[1]
	var cached *gguf.Affine // one matrix at a time: its three entries are written one after another
	load := func() (*gguf.Affine, error) {
		if cached != nil {
			return cached, nil
		}
		a, err := w.file.ReadAffine(src)
		if err == nil && len(target.RowShape) > 0 {
			err = a.Permute(target.RowShape, target.RowPerm)
		}
		cached = a
		return a, err
	}
	part := func(suffix, dtype string, width int64, size int64, last bool, pick func(*gguf.Affine) []byte) tensor {
		return tensor{size: rows * width * size, Entry: safetensors.Entry{
			Name: target.Target + suffix, Dtype: dtype, Shape: []int64{rows, width},
			Write: func(out io.Writer) error {
				a, err := load()
				if err != nil {
					return err
				}
				if last {
					cached = nil
				}
				_, err = out.Write(pick(a))
				return err
			},
		}}
	}
	return []tensor{ // in name order, which is the order of writing
		part(".biases", "F16", cols/gguf.Group, 2, false, func(a *gguf.Affine) []byte { return a.Biases }),
		part(".scales", "F16", cols/gguf.Group, 2, false, func(a *gguf.Affine) []byte { return a.Scales }),
		part(".weight", "U32", cols*bits/32, 4, true, func(a *gguf.Affine) []byte { return a.Data }),
	}, nil
}

func (w *writer) copyPlain(out io.Writer, src gguf.Tensor, target sdk.ImportTarget) error {
	if len(target.RowShape) == 0 {
		_, err := io.Copy(out, w.file.Section(src))
		return err
	}
	rows := int(src.Shape[0])
	order, err := gguf.RowOrder(rows, target.RowShape, target.RowPerm)
	if err != nil {
		return fmt.Errorf("tensor %s: %w", src.Name, err)
	}
	section, row := w.file.Section(src), make([]byte, src.Size/int64(rows))
	for _, r := range order {
		if _, err := section.ReadAt(row, int64(r)*int64(len(row))); err != nil {
			return err
		}
		if _, err := out.Write(row); err != nil {
			return err
		}
	}
	return nil
}

// weights writes the shards and, as mlx-lm does, an index even for one shard.
func (w *writer) weights(tensors []tensor) (total int64, err error) {
	var shards [][]tensor
	size := int64(maxShardBytes)
	for _, t := range tensors {
		if size+t.size > maxShardBytes {
			shards, size = append(shards, nil), 0
		}
		shards[len(shards)-1] = append(shards[len(shards)-1], t)
		size += t.size
		total += t.size
	}
	index := map[string]string{}
	for i, shard := range shards {
		if err := w.ctx.Err(); err != nil {
			return 0, err
		}
		name := "model.safetensors"
		if len(shards) > 1 {
			name = fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
		}
		entries := make([]safetensors.Entry, len(shard))
		for j, t := range shard {
			entries[j] = t.Entry
			index[t.Name] = name
		}
		if err := safetensors.WriteFile(filepath.Join(w.dir, name), map[string]string{"format": "mlx"}, entries); err != nil {
			return 0, err
		}
	}
	raw, err := json.MarshalIndent(object{"metadata": object{"total_size": total}, "weight_map": index}, "", "  ")
	if err != nil {
		return 0, err
	}
	return total, os.WriteFile(filepath.Join(w.dir, safetensors.IndexFile), raw, 0o644)
}

// config adds to the family's config what the container's types decide: the quantization of each matrix, with the most
// common width as the default and the others as overrides by path, and the dtype of the scales.
func (w *writer) config(quant quantization) ([]byte, error) {
	var c object
	d := json.NewDecoder(bytes.NewReader(w.plan.Config))
	d.UseNumber() // numbers pass through as the family wrote them
	if err := d.Decode(&c); err != nil {
		return nil, fmt.Errorf("the %s executor planned a config that is no JSON object: %w", w.plan.Family, err)
	}
	for k, v := range w.specialIDs() {
		if _, ok := c[k]; !ok {
			c[k] = v
		}
	}
	counts := map[int]int{}
	for _, bits := range quant {
		counts[bits]++
	}
	if bits := mostCommon(counts); bits > 0 {
		q := object{"group_size": gguf.Group, "bits": bits, "mode": "affine"}
		for path, b := range quant {
			switch b {
			case bits:
			case 0:
				q[path] = false
			default:
				q[path] = object{"group_size": gguf.Group, "bits": b, "mode": "affine"}
			}
		}
		c["quantization"], c["quantization_config"] = q, q
		c["torch_dtype"] = "float16"
	} else {
		c["torch_dtype"] = w.plainDtype()
	}
	return json.MarshalIndent(c, "", "    ")
}

// mostCommon returns the width that most matrices have, the narrower one in a tie; 0 if none is quantized.
func mostCommon(counts map[int]int) int {
	best := 0
	for bits, n := range counts {
		if bits > 0 && (best == 0 || n > counts[best] || n == counts[best] && bits < best) {
			best = bits
		}
	}
	return best
}

// plainDtype returns the dtype of the token embedding's type: the one activations start in.
func (w *writer) plainDtype() string {
	names := map[gguf.Type]string{gguf.F32: "float32", gguf.F16: "float16", gguf.BF16: "bfloat16"}
	for _, t := range w.file.Tensors {
		if len(t.Shape) == 2 {
			return names[t.Type]
		}
	}
	return names[gguf.F32]
}

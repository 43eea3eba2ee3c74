// Package modelrepo owns model folders: which files are there, what config.json says of any model, and
// whether the weights are whole. It never reads a tensor.
package modelrepo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// Names of the files of a model folder.
const (
	TokenizerFile        = "tokenizer.json"
	TokenizerConfigFile  = "tokenizer_config.json"
	GenerationConfigFile = "generation_config.json"
)

// NotFoundError reports a folder that is no model folder. Reason says what is missing and what to do.
type NotFoundError struct {
	Dir    string
	Reason string
}

func (e *NotFoundError) Error() string { return fmt.Sprintf("%s: %s", e.Dir, e.Reason) }

// Model is an opened model folder.
type Model struct {
	Dir           string
	ModelType     string  // config.json's model_type, which names the family
	ContextLength int     // max_position_embeddings; 0 when the config does not bound it
	EOS           []int32 // ids that end an answer: generation_config.json's, else config.json's
	Weights       *safetensors.Checkpoint
	WeightsErr    error // why Weights is nil; wraps safetensors.ErrNoWeights where only the config is there
}

// Open reads the folder's config and the headers of its weights. Weights that are absent or broken are no error here, since
// a plan can be made without them: RequireWeights turns them into one.
func Open(dir string) (*Model, error) {
	st, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &NotFoundError{dir, "no such model folder; give --model a folder with config.json and *.safetensors files"}
	case err != nil:
		return nil, err
	case !st.IsDir():
		return nil, &NotFoundError{dir, "not a folder; --model takes the folder that holds config.json" + importHint(dir)}
	}
	path := filepath.Join(dir, config.FileName)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &NotFoundError{dir, "no config.json; --model takes the folder that holds it"}
	}
	if err != nil {
		return nil, err
	}
	c, err := config.Parse(raw, path)
	if err != nil {
		return nil, err
	}
	m := &Model{Dir: dir, ModelType: c.StringOr("model_type", "")}
	if m.ModelType == "" {
		return nil, &NotFoundError{dir, "config.json has no model_type, which names the model's family"}
	}
	text := c
	if t := c.Object("text_config"); t != nil { // a model with more than text keeps the text tower's keys there
		text = t
	}
	m.ContextLength = text.SizeOr("max_position_embeddings", 0)
	if m.EOS, err = eosIDs(dir, c, text); err != nil {
		return nil, err
	}
	if err := c.Err(); err != nil {
		return nil, err
	}
	m.Weights, m.WeightsErr = safetensors.Open(dir)
	return m, nil
}

// RequireWeights returns why the model can't be loaded, nil if its weights are whole.
func (m *Model) RequireWeights() error {
	if errors.Is(m.WeightsErr, safetensors.ErrNoWeights) {
		return fmt.Errorf("%w: the folder holds a config only, which can be planned but not run", m.WeightsErr)
	}
	return m.WeightsErr
}

func importHint(path string) string {
	if filepath.Ext(path) == ".gguf" {
		return fmt.Sprintf("; convert the file first: mlxcel import %s FOLDER", path)
	}
	return ""
}

// eosIDs follows transformers: the generation config's eos_token_id, a number or a list, over the model config's.
func eosIDs(dir string, c, text *config.Object) ([]int32, error) {
	path := filepath.Join(dir, GenerationConfigFile)
	raw, err := os.ReadFile(path)
	if err == nil {
		g, err := config.Parse(raw, path)
		if err != nil {
			return nil, err
		}
		if ids, err := tokenIDs(g, path); len(ids) > 0 || err != nil {
			return ids, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	path = filepath.Join(dir, config.FileName)
	if ids, err := tokenIDs(c, path); len(ids) > 0 || err != nil {
		return ids, err
	}
	return tokenIDs(text, path)
}

func tokenIDs(o *config.Object, path string) ([]int32, error) {
	const key = "eos_token_id"
	list, ok := o.Value(key).([]any)
	if !ok {
		if !o.Has(key) {
			return nil, nil
		}
		list = []any{o.Value(key)}
	}
	var ids []int32
	for _, v := range list {
		id, ok := config.Integer(v)
		if !ok || id < 0 || id > 1<<31-1 {
			return nil, fmt.Errorf("%s: %s is %v, want token ids", path, key, v)
		}
		if !slices.Contains(ids, int32(id)) {
			ids = append(ids, int32(id))
		}
	}
	return ids, nil
}

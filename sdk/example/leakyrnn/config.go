package leakyrnn

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/mlxcel/mlxcel/sdk"
)

// Family is the wire name, and config.json's model_type.
const Family = "leaky_rnn"

// Config is the model's config.json.
type Config struct {
	ModelType     string `json:"model_type"`
	HiddenSize    int    `json:"hidden_size"`
	Layers        int    `json:"num_hidden_layers"`
	VocabSize     int    `json:"vocab_size"`
	ContextLength int    `json:"max_position_embeddings"` // 0 means unbounded
	Tied          bool   `json:"tie_word_embeddings"`
}

func readConfig(dir string) (*Config, error) {
	path := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &sdk.Error{Code: sdk.CodeNotFound, Message: "no config.json in " + dir + ": name a model folder", File: path}
	}
	if err != nil {
		return nil, err
	}
	c := &Config{}
	if err := json.Unmarshal(text, c); err != nil {
		return nil, configError(path, "%s is no valid config: %v", path, err)
	}
	if c.ModelType != Family {
		return nil, configError(path, "%s has model_type %q, this executor runs %q", path, c.ModelType, Family)
	}
	for _, size := range []struct {
		key   string
		value int
		min   int
	}{
		{"hidden_size", c.HiddenSize, 1},
		{"num_hidden_layers", c.Layers, 1},
		{"vocab_size", c.VocabSize, 1},
		{"max_position_embeddings", c.ContextLength, 0},
	} {
		if size.value < size.min || size.value > 1<<24 {
			return nil, configError(path, "%s has %s %d, want a number from %d", path, size.key, size.value, size.min)
		}
	}
	return c, nil
}

func configError(path, format string, args ...any) error {
	err := sdk.Errorf(sdk.CodeInvalid, format, args...)
	err.File = path
	return err
}

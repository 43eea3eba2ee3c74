package stagetest

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// Golden is what mlx-lm made of a checkpoint, as scripts/parity/trim.py writes it.
type Golden struct {
	Mode string      `json:"mode"`
	Runs []GoldenRun `json:"runs"`
}

// GoldenRun is one prompt and its greedy continuation.
type GoldenRun struct {
	Prompt   string       `json:"prompt"`
	IDs      []int32      `json:"prompt_ids"`
	Tokens   []int32      `json:"tokens"`
	LogitStd float64      `json:"logit_std"` // standard deviation of the run's logits
	Steps    []GoldenStep `json:"steps"`
}

// GoldenStep is one generated token.
type GoldenStep struct {
	Margin float64       `json:"margin"` // between the two largest logits
	Top5   [5][2]float64 `json:"top5"`   // token, logit
}

// ReadGolden reads a golden of the checkpoint dir.
func ReadGolden(t testing.TB, dir, name string) *Golden {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	g := &Golden{}
	if err := json.Unmarshal(raw, g); err != nil {
		t.Fatalf("%s: %v", filepath.Join(dir, name), err)
	}
	if len(g.Runs) == 0 {
		t.Fatalf("%s has no runs", filepath.Join(dir, name))
	}
	return g
}

package leakyrnn

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/sdk"
)

func TestBadConfig(t *testing.T) {
	for name, c := range map[string]struct {
		text string // "" means no file
		code sdk.Code
		want string
	}{
		"no config":         {"", sdk.CodeNotFound, "no config.json"},
		"no JSON":           {"{", sdk.CodeInvalid, "no valid config"},
		"another family":    {`{"model_type": "llama"}`, sdk.CodeInvalid, `model_type "llama"`},
		"no hidden size":    {`{"model_type": "leaky_rnn"}`, sdk.CodeInvalid, "hidden_size 0"},
		"no layers":         {`{"model_type": "leaky_rnn", "hidden_size": 4}`, sdk.CodeInvalid, "num_hidden_layers 0"},
		"a huge vocabulary": {`{"model_type": "leaky_rnn", "hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 99999999}`, sdk.CodeInvalid, "vocab_size 99999999"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if c.text != "" {
				if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(c.text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			_, err := New(hclog.NewNullLogger()).Inspect(t.Context(), sdk.InspectRequest{Dir: dir})
			if err == nil || sdk.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one of code %v about %q", err, c.code, c.want)
			}
		})
	}
}

func TestUnsupported(t *testing.T) {
	dir := t.TempDir()
	if err := WriteRandom(dir, Config{HiddenSize: 4, Layers: 1, VocabSize: 8}, 1); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*sdk.LoadRequest){
		"another dtype":  func(r *sdk.LoadRequest) { r.Dtype = sdk.DtypeFloat16 },
		"another family": func(r *sdk.LoadRequest) { r.Family = "llama" },
		"ranks":          func(r *sdk.LoadRequest) { r.TPSize = 2 },
		"an adapter":     func(r *sdk.LoadRequest) { r.Adapter = "adapter" },
	} {
		t.Run(name, func(t *testing.T) {
			req := sdk.LoadRequest{Dir: dir, Family: Family, Layers: sdk.LayerRange{End: 1}}
			change(&req)
			_, err := New(hclog.NewNullLogger()).Load(t.Context(), req, func(sdk.LoadProgress) {})
			if err == nil || sdk.CodeOf(err) != sdk.CodeUnsupported {
				t.Errorf("error %v, want code unsupported", err)
			}
		})
	}
}

// TestDistribution draws often, and compares how often each token comes with what the sampler's settings leave of it.
func TestDistribution(t *testing.T) {
	logits := make([]float32, 4)
	for i, p := range []float64{0.5, 0.3, 0.15, 0.05} {
		logits[i] = float32(math.Log(p))
	}
	for name, c := range map[string]struct {
		sampler sdk.Sampler
		want    []float64
	}{
		"plain":      {sdk.Sampler{Temperature: 1}, []float64{0.5, 0.3, 0.15, 0.05}},
		"top-k":      {sdk.Sampler{Temperature: 1, TopK: 2}, []float64{0.625, 0.375, 0, 0}},
		"top-p":      {sdk.Sampler{Temperature: 1, TopP: 0.9}, []float64{0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0}},
		"min-p":      {sdk.Sampler{Temperature: 1, MinP: 0.4}, []float64{0.625, 0.375, 0, 0}},
		"cold":       {sdk.Sampler{Temperature: 0.5}, []float64{0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365}},
		"bias":       {sdk.Sampler{Temperature: 1, LogitBias: map[int32]float32{0: float32(math.Inf(-1))}}, []float64{0, 0.6, 0.3, 0.1}},
		"greedy":     {sdk.Sampler{}, []float64{1, 0, 0, 0}},
		"top-k of 1": {sdk.Sampler{Temperature: 2, TopK: 1}, []float64{1, 0, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			const draws = 20000
			counts := make([]float64, len(logits))
			for pos := range draws {
				token, err := sample(c.sampler, logits, nil, nil, pos)
				if err != nil {
					t.Fatal(err)
				}
				counts[token]++
			}
			for token, want := range c.want {
				// Five standard deviations of the count; the draws are the same in every run.
				if got := counts[token] / draws; math.Abs(got-want) > 5*math.Sqrt(want*(1-want)/draws) {
					t.Errorf("token %d came in %.4f of the draws, want %.4f", token, got, want)
				}
			}
		})
	}
}

func TestMaskThatAllowsNothing(t *testing.T) {
	if token, err := sample(sdk.Sampler{}, []float32{1, 2}, nil, []byte{0}, 3); sdk.CodeOf(err) != sdk.CodeInvalid {
		t.Errorf("token %d, %v, want an error of code invalid", token, err)
	}
}

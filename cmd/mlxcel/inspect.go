package main

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"

	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/urfave/cli/v2"
)

func inspectCommand() *cli.Command {
	return &cli.Command{
		Name:  "inspect",
		Usage: "profile a model folder without loading it, and check its files",
		Flags: append(append(pluginFlags(), modelFlag(), dtypeFlag()), &cli.BoolFlag{Name: "json", Usage: "print one JSON object"}),
		Action: func(c *cli.Context) error {
			cfg := engineConfig(c)
			if err := setModel(c, &cfg); err != nil {
				return err
			}
			found, err := engine.Inspect(c.Context, cfg)
			if err != nil {
				return err
			}
			if c.Bool("json") {
				err = printJSON(c.App.Writer, inspectionJSON(found))
			} else {
				printInspection(c.App.Writer, found)
			}
			if err == nil && failed(found.Checks) {
				err = exitCode(1)
			}
			return err
		},
	}
}

func failed(checks []engine.Check) bool {
	for _, c := range checks {
		if c.Err != nil {
			return true
		}
	}
	return false
}

func printInspection(w io.Writer, found *engine.Inspection) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-14s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("model", "%s", found.Model.Dir)
	line("family", "%s (model_type %s), executor %s", found.Family.Name, found.Model.ModelType, filepath.Base(found.Plugin))
	if p := found.Profile; p != nil {
		total, perToken := totals(p)
		source := "from the weights' headers"
		if !p.Exact {
			source = "estimated from config.json"
		}
		line("layers", "%d, %s in all, %s", len(p.Layers), size(total), source)
		for _, run := range layerRuns(p.Layers) {
			line("", "%s %s: %s each, %d KV bytes per token", run.name(), run.layer.Kind, size(run.layer.Weights), run.layer.PositionBytes())
		}
		line("embedding", "%s", size(p.Embedding))
		if p.Tied {
			line("head", "%s, tied to the embedding", size(p.Head))
		} else {
			line("head", "%s", size(p.Head))
		}
		line("KV cache", "%d bytes per token", perToken)
		line("quantization", "%s", p.Quantization)
		line("activations", "%s, width %d", p.Boundary.Dtype, p.Boundary.Width)
		line("vocabulary", "%d", p.VocabSize)
		line("context", "%d tokens", p.ContextLength)
	}
	for _, c := range found.Checks {
		if c.Err != nil {
			line(c.Name, "FAULT: %v", c.Err)
		} else {
			line(c.Name, "%s", c.Text)
		}
	}
}

// totals sums weights, a tied head once, and KV bytes per token.
func totals(p *sdk.ModelProfile) (weights, kv int64) {
	weights = p.Embedding + p.Head - p.TiedBytes
	for _, l := range p.Layers {
		weights += l.Weights
		kv += l.PositionBytes()
	}
	return weights, kv
}

// layerRun is a run of equal layers.
type layerRun struct {
	first, last int
	layer       sdk.LayerProfile
}

func (r layerRun) name() string {
	if r.first == r.last {
		return fmt.Sprintf("layer %d", r.first)
	}
	return fmt.Sprintf("layers %d-%d", r.first, r.last)
}

func equal(a, b sdk.LayerProfile) bool {
	return a.Kind == b.Kind && a.Weights == b.Weights && slices.Equal(a.States, b.States)
}

// window returns the positions after which the layer's caches stop growing; 0 where one of them does not.
func window(l sdk.LayerProfile) int {
	most := 0
	for _, s := range l.States {
		if s.BytesPerPosition > 0 && s.Window == 0 {
			return 0
		}
		most = max(most, s.Window)
	}
	return most
}

func layerRuns(layers []sdk.LayerProfile) []layerRun {
	var runs []layerRun
	for i, l := range layers {
		if n := len(runs); n > 0 && equal(runs[n-1].layer, l) {
			runs[n-1].last = i
			continue
		}
		runs = append(runs, layerRun{i, i, l})
	}
	return runs
}

func inspectionJSON(found *engine.Inspection) map[string]any {
	out := map[string]any{
		"model": found.Model.Dir, "family": found.Family.Name, "model_type": found.Model.ModelType, "plugin": found.Plugin,
		"eos_token_ids": found.Model.EOS,
	}
	if p := found.Profile; p != nil {
		layers := []map[string]any{}
		for _, l := range p.Layers {
			layers = append(layers, map[string]any{
				"kind": l.Kind, "weight_bytes": l.Weights, "kv_bytes_per_token": l.PositionBytes(),
				"kv_window": window(l), "state_bytes": l.StateBytes(0, 0),
			})
		}
		total, perToken := totals(p)
		out["profile"] = map[string]any{
			"layers": layers, "embedding_bytes": p.Embedding, "head_bytes": p.Head, "tied": p.Tied, "tied_bytes": p.TiedBytes, "weight_bytes": total,
			"kv_bytes_per_token": perToken, "quantization": p.Quantization, "context_length": p.ContextLength,
			"vocab_size": p.VocabSize, "hidden_size": p.HiddenSize, "exact": p.Exact,
			"boundary": map[string]any{"width": p.Boundary.Width, "dtype": p.Boundary.Dtype.String()},
		}
	}
	checks := []map[string]any{}
	for _, c := range found.Checks {
		entry := map[string]any{"name": c.Name, "ok": c.Err == nil, "text": c.Text}
		if c.Err != nil {
			entry["text"] = c.Err.Error()
		}
		checks = append(checks, entry)
	}
	out["checks"] = checks
	return out
}

package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

// TestMain lets this binary be the executor of its own tests.
func TestMain(m *testing.M) {
	if sdk.Launched() {
		sdk.Serve(sdk.ServeOptions{New: func(l hclog.Logger) sdk.Executor { return pricer{leakyrnn.New(l)} }})
		return
	}
	os.Exit(m.Run())
}

// pricer prices families and runs none.
type pricer struct{ sdk.Executor }

const deviceMemory = 64 << 30

func (p pricer) Describe(ctx context.Context) (*sdk.Description, error) {
	d, err := p.Executor.Describe(ctx)
	if err == nil {
		d.Devices[0].TotalMemory, d.Devices[0].FreeMemory = deviceMemory, 1<<30
		d.Families = []sdk.Family{
			{Name: "whole", ModelTypes: []string{"whole"}, PlanOnly: true},
			{Name: "split", ModelTypes: []string{"split"}, PlanOnly: true, Pipeline: true},
			{Name: "running", ModelTypes: []string{"running"}, Pipeline: true, Quantizations: []string{"none", "affine-4"}},
		}
	}
	return d, err
}

// Inspect takes the number of layers of 1 GiB each from the config.
func (p pricer) Inspect(_ context.Context, req sdk.InspectRequest) (*sdk.ModelProfile, error) {
	raw, err := os.ReadFile(filepath.Join(req.Dir, "config.json"))
	var config struct {
		Layers int `json:"num_hidden_layers"`
	}
	if err == nil {
		err = json.Unmarshal(raw, &config)
	}
	if err != nil {
		return nil, err
	}
	profile := &sdk.ModelProfile{
		Family: "test", Embedding: 1 << 30, Head: 1 << 30, ContextLength: 16384, Quantization: "none", VocabSize: 8, HiddenSize: 8,
		Boundary: sdk.Boundary{Width: 8, Dtype: sdk.DtypeBFloat16},
	}
	for range config.Layers {
		profile.Layers = append(profile.Layers, sdk.LayerProfile{
			Kind: "attention", Weights: 1 << 30, States: []sdk.StateProfile{{Kind: sdk.StateKV, BytesPerPosition: 4096}},
		})
	}
	return profile, nil
}

// testConfig has this binary as the only executor, and a model of the given type and number of layers, config only.
func testConfig(t *testing.T, modelType string, layers int) Config {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	plugins, model := t.TempDir(), t.TempDir()
	binary, err := os.ReadFile(self)
	if err == nil {
		err = os.WriteFile(filepath.Join(plugins, "pricer"), binary, 0o700)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(model, "config.json"), fmt.Appendf(nil, `{"model_type": %q, "num_hidden_layers": %d}`, modelType, layers), 0o600)
	}
	base, tempErr := os.MkdirTemp("", "mlxt") // t.TempDir is too long for a socket on macOS
	if err := errors.Join(err, tempErr); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	return Config{Model: model, Plugins: executor.Config{
		PluginDirs: []string{plugins}, Environ: []string{"PATH=" + os.Getenv("PATH")}, UID: os.Getuid(), RunBase: filepath.Join(base, "run"),
		StartTimeout: time.Minute, GraceTimeout: time.Minute, TermTimeout: time.Minute,
	}}
}

func TestPlanModel(t *testing.T) {
	cfg := testConfig(t, "split", 20)
	cfg.Pipeline.Size = new(2)
	planned, err := PlanModel(t.Context(), cfg, PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	d := planned.Document
	if d.Context != partition.DefaultContext || d.Sequences != 1 || d.Family != "split" || d.Profile.Exact || !d.PlanOnly || !planned.Local {
		t.Errorf("%+v", d)
	}
	h := partition.DefaultHeadroom()
	if want := h.Of(deviceMemory, 2); len(d.Stages) != 2 || *d.Stages[0].Budget != want || d.Stages[1].Memory != "local" || !d.Fits {
		t.Errorf("stages %+v, want a budget of %d", d.Stages, want)
	}
	for _, want := range []string{"plan-only", "no weights"} {
		if !strings.Contains(strings.Join(d.Warnings, "\n"), want) {
			t.Errorf("warnings %q lack %q", d.Warnings, want)
		}
	}
}

// A model that this machine can't hold is planned all the same, and told.
func TestPlanModelLargerThanThisMachine(t *testing.T) {
	planned, err := PlanModel(t.Context(), testConfig(t, "whole", 93), PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if d := planned.Document; d.Fits || *d.WhatFits.Context != 0 || !strings.Contains(d.Warnings[0], "lacks") {
		t.Errorf("%+v", d)
	}
}

func TestPlanModelOnStatedMemory(t *testing.T) {
	cfg := testConfig(t, "split", 60)
	planned, err := PlanModel(t.Context(), cfg, PlanConfig{Memory: []int64{16 << 30, 64 << 30}, Context: 8192, Sequences: 2})
	if err != nil {
		t.Fatal(err)
	}
	s := planned.Document.Stages
	if len(s) != 2 || *s[0].Budget != 16<<30 || s[0].Load > 16<<30 || s[1].Load > 64<<30 || s[0].End-s[0].Start >= s[1].End-s[1].Start {
		t.Errorf("%+v", s)
	}
	_, err = PlanModel(t.Context(), cfg, PlanConfig{Memory: []int64{16 << 30, 64 << 30}, Headroom: &partition.Headroom{Percent: 50}})
	var infeasible *partition.InfeasibleError
	if !errors.As(err, &infeasible) || infeasible.BudgetBytes != 32<<30 && infeasible.BudgetBytes != 8<<30 {
		t.Errorf("with half of it free: %v", err)
	}
}

func TestPlanModelRefuses(t *testing.T) {
	pipeline := func(size int, layers string) partition.PipelineConfig {
		c := partition.PipelineConfig{Size: &size}
		if layers != "" {
			c = partition.PipelineConfig{Layers: &layers}
		}
		return c
	}
	var (
		notPipeline *NotPipelineError
		tooMany     *partition.TooManyStagesError
		sizes       *StageMemoryError
		flag        *partition.FlagError
		budget      *partition.BudgetError
	)
	for name, tc := range map[string]struct {
		model    string
		pipeline partition.PipelineConfig
		plan     PlanConfig
		as       any
		want     string
	}{
		"whole over two stages":  {"whole", pipeline(2, ""), PlanConfig{}, &notPipeline, "not a supported pipeline family"},
		"whole by hand":          {"whole", pipeline(0, "0-1,2-3"), PlanConfig{}, &notPipeline, "--pp-layers"},
		"whole over two devices": {"whole", partition.PipelineConfig{}, PlanConfig{Memory: []int64{1 << 40, 1 << 40}}, &notPipeline, "2 stages"},
		"too many stages":        {"split", pipeline(5, ""), PlanConfig{}, &tooMany, "4 layers"},
		"too few sizes":          {"split", pipeline(2, ""), PlanConfig{Memory: []int64{1 << 40}}, &sizes, "1 of 2 sizes"},
		"too many sizes":         {"split", pipeline(0, "0-3"), PlanConfig{Memory: []int64{1 << 40, 1}}, &sizes, "2 of 1 sizes"},
		"context too long":       {"split", pipeline(1, ""), PlanConfig{Context: 16385}, &flag, "16384"},
		"too many speeds":        {"split", partition.PipelineConfig{Objective: partition.ObjectiveSpeed, Speeds: []float64{1, 2}}, PlanConfig{}, &flag, "2 speeds for 1 stages"},
		"speeds without purpose": {"split", partition.PipelineConfig{Speeds: []float64{1}}, PlanConfig{}, &flag, "--pp-objective speed"},
		"all headroom":           {"split", pipeline(1, ""), PlanConfig{Memory: []int64{1 << 30}, Headroom: &partition.Headroom{Fixed: 1 << 30}}, &budget, "--memory-headroom"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t, tc.model, 4)
			cfg.Pipeline = tc.pipeline
			planned, err := PlanModel(t.Context(), cfg, tc.plan)
			if !errors.As(err, tc.as) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %+v, %v, want %q", planned, err, tc.want)
			}
		})
	}
}

// What a run is refused, and what it is only warned of.
func TestPlanLocal(t *testing.T) {
	layer := sdk.LayerProfile{Weights: 1 << 30, States: []sdk.StateProfile{{Kind: sdk.StateKV, BytesPerPosition: 1 << 20}}}
	profile := &sdk.ModelProfile{Family: "test", ContextLength: 8192, Quantization: "none", Layers: []sdk.LayerProfile{layer, layer, layer, layer}}
	two := partition.PipelineConfig{Size: new(2)}
	plan := func(total, free int64) (*partition.Plan, error) {
		return planLocal(two, profile, executor.Choice{Entry: executor.Entry{Device: sdk.Device{TotalMemory: total, FreeMemory: free}}})
	}
	for name, tc := range map[string]struct {
		total, free int64
		warnings    []string // in order
	}{
		"roomy":          {64 << 30, 60 << 30, nil},
		"unknown":        {0, 0, nil},
		"little is free": {64 << 30, 3 << 30, []string{"only 3.0 GiB"}},
		"caches are too": {8 << 30, 7 << 30, []string{"lacks"}},
		"just enough":    {4 << 30, 1 << 30, []string{"lacks", "only 1.0 GiB"}},
		"a tiny machine": {4<<30 + 1, 4 << 30, []string{"lacks"}},
	} {
		p, err := plan(tc.total, tc.free)
		if err != nil || len(p.Warnings) != len(tc.warnings) {
			t.Errorf("%s: %+v, %v", name, p, err)
			continue
		}
		for i, want := range tc.warnings {
			if !strings.Contains(p.Warnings[i], want) {
				t.Errorf("%s: warning %q, want %q", name, p.Warnings[i], want)
			}
		}
		if p.Stages[0].LayerRange.End != 2 || p.Stages[0].Load.KV != 2<<20*partition.DefaultContext {
			t.Errorf("%s: %+v", name, p.Stages)
		}
	}
	p, err := plan(4<<30-1, 4<<30-1)
	var infeasible *partition.InfeasibleError
	if !errors.As(err, &infeasible) || infeasible.LackBytes != 1 {
		t.Errorf("weights that never fit: %+v, %v", p, err)
	}
}

func TestCheckRunnable(t *testing.T) {
	choice := func(f sdk.Family) executor.Choice { return executor.Choice{Family: f} }
	var notPipeline *NotPipelineError
	var planOnly *PlanOnlyError
	if err := checkRunnable(choice(sdk.Family{Pipeline: true}), 3); err != nil {
		t.Error(err)
	}
	if err := checkRunnable(choice(sdk.Family{}), 1); err != nil {
		t.Error(err)
	}
	if err := checkRunnable(choice(sdk.Family{PlanOnly: true}), 2); !errors.As(err, &notPipeline) {
		t.Error(err)
	}
	if err := checkRunnable(choice(sdk.Family{PlanOnly: true}), 1); !errors.As(err, &planOnly) {
		t.Error(err)
	}
	if err := checkRunnable(choice(sdk.Family{Name: "f", PlanOnly: true, Pipeline: true}), 2); !errors.As(err, &planOnly) || !strings.Contains(err.Error(), "the f family is plan-only") {
		t.Error(err)
	}
}

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/partition"
)

func planOf(t testing.TB, args ...string) *partition.Document {
	t.Helper()
	out, errs, code := mlxcel(t, "", append([]string{"plan", "--json"}, args...)...)
	if code != 0 {
		t.Fatalf("mlxcel plan %v: exit code %d: %s", args, code, errs)
	}
	var d partition.Document
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("mlxcel plan %v printed %q: %v", args, out, err)
	}
	return &d
}

// bare is the model's folder with nothing but its config.
func bare(t testing.TB, from string) string {
	t.Helper()
	dir := t.TempDir()
	data, err := os.ReadFile(filepath.Join(from, "config.json"))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPlanIsWhatGenerateRuns(t *testing.T) {
	d := planOf(t, "-m", smolLM2, "--stages", "3")
	a := answerOf(t, "-m", smolLM2, "-p", "hi", "-n", "1", "--pp-size", "3")
	if len(d.Stages) != 3 || len(a.Plan.Stages) != 3 {
		t.Fatalf("plan %+v, run %+v", d.Stages, a.Plan.Stages)
	}
	for i, s := range a.Plan.Stages {
		p := d.Stages[i]
		if p.Start != s.Start || p.End != s.End || p.Layers != s.Layers || p.Weights != s.Bytes {
			t.Errorf("stage %d: planned %+v, runs %+v", i, p, s)
		}
	}
}

func TestPlanNumbers(t *testing.T) {
	d := planOf(t, "-m", smolLM2, "--stage-memory", "100MiB,300MiB", "--ctx", "4096", "--parallel", "2")
	if d.Context != 4096 || d.Sequences != 2 || !d.Profile.Exact || !d.Profile.Tied || len(d.Profile.Layers) != 30 || d.Profile.Layers[0].KV != 768*4096*2 {
		t.Errorf("%+v", d)
	}
	next := 0
	for i, budget := range []int64{100 << 20, 300 << 20} {
		s := d.Stages[i]
		if s.Start != next || s.Load > budget || *s.Budget != budget || s.Load != s.Weights+s.KV+s.State {
			t.Errorf("stage %d: %+v", i, s)
		}
		next = s.End
	}
	if next != 30 || d.Stages[0].End >= 15 || d.Imbalance < 1.5 || len(d.Warnings) != 1 || !strings.Contains(d.Warnings[0], "imbalanced") {
		t.Errorf("stages end at %d, imbalance %v, warnings %q", next, d.Imbalance, d.Warnings)
	}
	longest := *d.WhatFits.Context
	planOf(t, "-m", smolLM2, "--stage-memory", "100MiB,300MiB", "--ctx", fmt.Sprint(longest), "--parallel", "2")
	if _, errs, code := mlxcel(t, "", "plan", "-m", smolLM2, "--stage-memory", "100MiB,300MiB", "--ctx", fmt.Sprint(longest+1), "--parallel", "2"); code != 1 {
		t.Errorf("a context of %d fits too: %s", longest+1, errs)
	}
}

func TestPlanOfBareConfig(t *testing.T) {
	exact, estimate := planOf(t, "-m", smolLM2, "--stages", "2"), planOf(t, "-m", bare(t, smolLM2), "--stages", "2")
	if estimate.Profile.Exact || !strings.Contains(strings.Join(estimate.Warnings, " "), "estimated from config.json") {
		t.Errorf("exact %v, warnings %q", estimate.Profile.Exact, estimate.Warnings)
	}
	for i, s := range exact.Stages {
		if e := estimate.Stages[i]; e.Start != s.Start || float64(e.Load) < 0.98*float64(s.Load) || float64(e.Load) > 1.02*float64(s.Load) {
			t.Errorf("stage %d is %+v, estimated %+v", i, s, e)
		}
	}
}

func TestPlanTable(t *testing.T) {
	out, errs, code := mlxcel(t, "", "plan", "-m", smolLM2, "--stages", "2")
	for _, want := range []string{"30 layers", "4096 tokens of context", "0-14", "15-29", "[#", "%", "local", "imbalance", "1.00x", "what fits", "8192 tokens (the model's own limit)"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("the table (exit code %d) lacks %q: %s%s", code, want, out, errs)
		}
	}
}

func TestPlanBySpeed(t *testing.T) {
	d := planOf(t, "-m", smolLM2, "--stages", "2", "--pp-objective", "speed", "--stage-speed", "1,3")
	if d.Objective != partition.ObjectiveSpeed || d.Stages[0].End >= 15 {
		t.Errorf("%+v", d.Stages)
	}
}

func TestBar(t *testing.T) {
	budget := int64(1000)
	for load, want := range map[int64]string{
		0: "[--------------------]   0%", 1: "[#-------------------]   1%", 500: "[##########----------]  50%",
		999: "[###################-] 100%", 1000: "[####################] 100%", 1001: "[####################] 101% does not fit",
	} {
		if got := bar(load, &budget); got != want {
			t.Errorf("%d of %d: %q, want %q", load, budget, got, want)
		}
	}
	if got := bar(1, nil); got != "" {
		t.Errorf("no budget: %q", got)
	}
}

func TestPlanBadInput(t *testing.T) {
	run := func(args ...string) []string { return append([]string{"plan", "-m", smolLM2}, args...) }
	broken := bare(t, smolLM2)
	if err := os.WriteFile(filepath.Join(broken, "config.json"), []byte(`{"model_type": "llama",`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		args []string
		want []string // parts of the message
	}{
		"no model":               {[]string{"plan"}, []string{"--model"}},
		"broken config":          {[]string{"plan", "-m", broken}, []string{"config.json"}},
		"stray argument":         {run("stray"), []string{"stray"}},
		"more stages than cuts":  {run("--stages", "31"), []string{"--stages 30 or less", "30 layers"}},
		"no stages":              {run("--stages", "0"), []string{"--stages", "at least 1"}},
		"layer larger than any":  {run("--stage-memory", "45MiB,45MiB", "--ctx", "8192", "--parallel", "8"), []string{"layer 0 alone takes 50.1 MiB", "lacks"}},
		"embedding too large":    {run("--stage-memory", "20MiB,400MiB"), []string{"stage 0", "embedding alone takes 30.4 MiB"}},
		"what would fit":         {run("--stage-memory", "120MiB,120MiB", "--parallel", "3"), []string{"lacks", "1 sequence instead of 3", "more stage", "--ctx"}},
		"zero memory":            {run("--stage-memory", "8GiB,0"), []string{"--stage-memory", "stage 1", "0 bytes"}},
		"negative memory":        {run("--stage-memory", "-8GiB"), []string{"--stage-memory", "stage 0", "-8GiB"}},
		"nonsense memory":        {run("--stage-memory", "8GiB,lots"), []string{"--stage-memory", "stage 1", "lots", "GiB"}},
		"wrong number of sizes":  {run("--stages", "3", "--stage-memory", "8GiB,8GiB"), []string{"--stage-memory", "2 of 3"}},
		"headroom takes all":     {run("--stage-memory", "1GiB", "--memory-headroom", "1GiB"), []string{"--memory-headroom", "stage-0"}},
		"nonsense headroom":      {run("--memory-headroom", "100%"), []string{"--memory-headroom", "100%"}},
		"context 0":              {run("--ctx", "0"), []string{"--ctx 0"}},
		"context too long":       {run("--ctx", "8193"), []string{"--ctx", "8192"}},
		"no sequences":           {run("--parallel", "0"), []string{"--parallel 0"}},
		"absurdly many":          {run("--parallel", "9223372036854775807"), []string{"--parallel", "--ctx"}},
		"unknown objective":      {run("--pp-objective", "luck"), []string{"--pp-objective", "memory", "speed"}},
		"speed of nothing":       {run("--stages", "2", "--stage-speed", "1,2"), []string{"--stage-speed", "--pp-objective speed"}},
		"speed 0":                {run("--stages", "2", "--pp-objective", "speed", "--stage-speed", "0,2"), []string{"--stage-speed", "stage 0"}},
		"ranges with a gap":      {run("--pp-layers", "0-3,5-29"), []string{"--pp-layers", "layer 4"}},
		"ranges that do not fit": {run("--pp-layers", "0-14,15-29", "--stage-memory", "100MiB,300MiB"), []string{"--pp-layers", "stage 0", "automatic cut"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, code := mlxcel(t, "", tc.args...)
			if code != 1 || out != "" {
				t.Errorf("exit code %d, stdout %q, want 1 and nothing", code, out)
			}
			for _, want := range tc.want {
				if !strings.Contains(errs, want) {
					t.Errorf("the message lacks %q: %s", want, errs)
				}
			}
		})
	}
}

// A plan leaves nothing behind, whether it is made or not.
func TestPlanLeavesNothing(t *testing.T) {
	tmp := t.TempDir()
	for _, args := range [][]string{{"plan", "-m", smolLM2}, {"plan", "-m", smolLM2, "--stage-memory", "1MiB"}} {
		cmd := exec.CommandContext(t.Context(), binary(t), args...)
		cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
		err := cmd.Run()
		if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
			t.Fatal(err)
		}
		if left, err := filepath.Glob(filepath.Join(tmp, "*", "*")); err != nil || len(left) > 0 {
			t.Errorf("mlxcel %v left %v, %v", args, left, err)
		}
	}
}

// Package sdktest owns the conformance checks that every executor must pass, in the test's process or as a binary.
//
// A family's test is three lines:
//
//	func TestConformance(t *testing.T) {
//		sdktest.Run(t, sdktest.Config{New: New, ModelDir: dir, Family: "llama"})
//	}
package sdktest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/sdk"
)

// Config says what to check.
type Config struct {
	// New makes an executor that runs in the test's process. Exactly one of New and Launch is set.
	New func(hclog.Logger) sdk.Executor
	// Launch starts an executor process; see Command.
	Launch Launcher

	ModelDir string // a model small enough to be loaded some hundred times
	Family   string // wire name

	// Dtypes are the activations' dtypes to check; none means DtypeAuto.
	Dtypes []sdk.Dtype
	// Prompt is the token ids to start from, at least 8; none means a made-up one.
	Prompt []int32
	// Generate is how many tokens to generate from a prompt; 0 means 6.
	Generate int
	// Cuts bounds how many split points are tried, spread evenly; 0 means every legal one.
	Cuts int
	// CopiesState says that the back end copies what a sequence keeps of another, and shares nothing.
	CopiesState bool
	// MemorySteps is how many steps must leave the memory flat; 0 means 600.
	MemorySteps int
	// Timeout bounds one check; 0 means two minutes.
	Timeout time.Duration
}

// Launcher starts an executor; stop ends it and frees everything.
type Launcher func() (client *sdk.Client, stop func() error, err error)

// check is one property of the contract. It returns errSkipped where the executor rightly lacks a feature.
type check struct {
	name string
	run  func(ctx context.Context, r *rig) error
	// dtypes tells that the check runs once for every dtype of the Config.
	dtypes bool
}

var errSkipped = errors.New("not supported by this executor")

// Run runs every check as a subtest.
func Run(t *testing.T, cfg Config) {
	t.Helper()
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	var models []*model
	for _, dtype := range cfg.Dtypes {
		m, err := learn(t.Context(), cfg, dtype)
		if err != nil {
			t.Fatalf("activations in %v: %v", dtype, err)
		}
		models = append(models, m)
	}
	for _, c := range checks() {
		t.Run(c.name, func(t *testing.T) {
			models := models
			if !c.dtypes {
				models = models[:1]
			}
			for _, m := range models {
				err := runCheck(t.Context(), cfg, c, m)
				if errors.Is(err, errSkipped) {
					t.Skip(err)
				}
				if err != nil {
					t.Errorf("activations in %v: %v", m.dtype, err)
				}
			}
		})
	}
}

// complete fills the defaults in.
func (cfg *Config) complete() error {
	if (cfg.New == nil) == (cfg.Launch == nil) {
		return errors.New("set exactly one of Config.New and Config.Launch")
	}
	if cfg.New != nil {
		cfg.Launch = inProcess(cfg.New)
	}
	if cfg.ModelDir == "" || cfg.Family == "" {
		return errors.New("set Config.ModelDir and Config.Family")
	}
	if len(cfg.Prompt) != 0 && len(cfg.Prompt) < 8 {
		return fmt.Errorf("a prompt of %d tokens, want at least 8", len(cfg.Prompt))
	}
	if len(cfg.Dtypes) == 0 {
		cfg.Dtypes = []sdk.Dtype{sdk.DtypeAuto}
	}
	for value, fallback := range map[*int]int{&cfg.Generate: 6, &cfg.MemorySteps: 600} {
		if *value == 0 {
			*value = fallback
		}
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 2 * time.Minute
	}
	return nil
}

func inProcess(make func(hclog.Logger) sdk.Executor) Launcher {
	return func() (*sdk.Client, func() error, error) {
		return sdk.InProcess(make(hclog.NewNullLogger()))
	}
}

// runCheck runs one check with executors of its own.
func runCheck(ctx context.Context, cfg Config, c check, m *model) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Timeout, fmt.Errorf("the check took longer than %v", cfg.Timeout))
	defer cancel()
	r := &rig{cfg: cfg, model: m}
	defer func() { err = errors.Join(err, r.close()) }()
	return c.run(ctx, r)
}

// checks lists all checks in the order that makes the first failure the most telling.
func checks() []check {
	return []check{
		{name: "describe", run: checkDescribe},
		{name: "inspect", run: checkInspect},
		{name: "weights", run: checkWeights, dtypes: true},
		{name: "progress", run: checkProgress},
		{name: "load errors", run: checkLoadErrors},
		{name: "damaged weights", run: checkDamage},
		{name: "order", run: checkOrder},
		{name: "greedy", run: checkGreedy},
		{name: "log-probability", run: checkLogprob},
		{name: "scores", run: checkScores},
		{name: "split", run: checkSplit, dtypes: true},
		{name: "chunks", run: checkChunks, dtypes: true},
		{name: "batch", run: checkBatch, dtypes: true},
		{name: "slots", run: checkSlots},
		{name: "release", run: checkRelease},
		{name: "share", run: checkShare, dtypes: true},
		{name: "share errors", run: checkShareErrors},
		{name: "share counts", run: checkShareCounts},
		{name: "rewind", run: checkRewind, dtypes: true},
		{name: "rewind penalties", run: checkRewindPenalties},
		{name: "rewind refused", run: checkRewindRefused},
		{name: "snapshots", run: checkSnapshots},
		{name: "generated", run: checkGenerated},
		{name: "state", run: checkState, dtypes: true},
		{name: "state layers", run: checkStateLayers},
		{name: "state errors", run: checkStateErrors},
		{name: "needs", run: checkNeeds},
		{name: "capabilities", run: checkCapabilities},
		{name: "unknown sequence", run: checkUnknownSequence},
		{name: "positions", run: checkPositions},
		{name: "cancel", run: checkCancel},
		{name: "stats", run: checkStats},
		{name: "price", run: checkPrice, dtypes: true},
		{name: "reload", run: checkReload},
		{name: "seeds", run: checkSeeds},
		{name: "mask", run: checkMask},
		{name: "penalties", run: checkPenalties},
		{name: "budget", run: checkBudget},
		{name: "memory", run: checkMemory},
	}
}

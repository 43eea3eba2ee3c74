package engine

import (
	"context"
	"errors"
	"path/filepath"
	"strings"

	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/tokenize"
	"github.com/mlxcel/mlxcel/sdk"
)

// Engine is one model, loaded and ready. It is safe for concurrent use.
type Engine struct {
	Model       *modelrepo.Model
	Profile     *sdk.ModelProfile
	Tokenizer   *tokenize.Tokenizer
	Template    *chat.Template // nil when the model has none
	Pipeline    *pipeline.Pipeline
	LoadSeconds float64 // from Open's start until the model was ready

	cfg     Config
	dir     string            // absolute: what an executor is told must not hang on where it runs
	catalog *executor.Catalog // of executors on this machine
	remote  Stages            // stages on other machines; nil where they run here
}

// Open checks the folder, finds the executor, plans and loads. Nothing is left running when it fails.
func Open(ctx context.Context, cfg Config) (e *Engine, err error) {
	cfg = cfg.withDefaults()
	start := cfg.Now()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e = &Engine{cfg: cfg}
	if e.Model, err = modelrepo.Open(cfg.Model); err != nil {
		return nil, err
	}
	if e.dir, err = filepath.Abs(cfg.Model); err != nil {
		return nil, err
	}
	if err := e.Model.RequireWeights(); err != nil {
		return nil, err
	}
	if err := e.bringUp(ctx, e.load); err != nil {
		return nil, err
	}
	e.LoadSeconds = cfg.Now().Sub(start).Seconds()
	return e, nil
}

// bringUp loads the model while tokenizer and template are read. Nothing is left running when one of them fails.
func (e *Engine) bringUp(ctx context.Context, load func(context.Context) error) error {
	text := make(chan error, 1)
	go func() { text <- e.openText(ctx) }()
	loaded := load(ctx)
	if err := errors.Join(loaded, <-text); err != nil {
		return errors.Join(err, e.Close(ctx))
	}
	return nil
}

// openText reads the tokenizer and the chat template, and tries the latter in a process of its own.
func (e *Engine) openText(ctx context.Context) (err error) {
	if e.Tokenizer, err = tokenize.Open(e.Model.Dir); err != nil {
		return err
	}
	var options []chat.Option
	if e.cfg.TemplateFile != "" {
		options = append(options, chat.WithFile(e.cfg.TemplateFile))
	}
	e.Template, err = chat.Open(e.Model.Dir, options...)
	if errors.Is(err, chat.ErrNoTemplate) {
		e.Template = nil
		return nil
	}
	if err != nil {
		return err
	}
	return e.Template.Probe(ctx, e.cfg.TemplateCheck)
}

// load takes the model from its family's executor to a running pipeline.
func (e *Engine) load(ctx context.Context) (err error) {
	if e.catalog, err = executor.Open(e.cfg.Plugins); err != nil {
		return err
	}
	if _, err = e.catalog.Scan(ctx); err != nil {
		return err
	}
	choice, err := e.catalog.ForModelType(e.Model.ModelType)
	if err != nil {
		return err
	}
	if err := checkRunnable(choice, e.cfg.Pipeline.Stages()); err != nil {
		return err
	}
	plugin := choice.Entry.Path
	if e.Profile, err = inspect(ctx, e.catalog, choice, e.cfg); err != nil { // its process becomes stage 0
		return err
	}
	plan, err := planLocal(e.cfg.Pipeline, e.Profile, choice)
	if err != nil {
		return err
	}
	for _, w := range plan.Warnings {
		e.cfg.Logger.Warn(w)
	}
	budgets, err := kvledger.Spread(e.cfg.KVBudgets, len(plan.Stages))
	if err != nil {
		return err
	}
	e.Pipeline, err = pipeline.Start(ctx, pipeline.Config{
		Plan: plan, Profile: e.Profile, Launcher: pipeline.Local{Catalog: e.catalog, Plugin: plugin},
		ModelDir: e.dir, Dtype: e.cfg.Dtype, Threads: e.cfg.Threads,
		PrefillChunk: e.cfg.PrefillChunk, Device: choice.Entry.Device, MicroBatch: e.cfg.Pipeline.MicroBatch(), KVBudgets: budgets, Epoch: e.cfg.Epoch,
	})
	if err != nil {
		return err
	}
	return e.catalog.Release(ctx) // executors of other families
}

// Drain tells the stages that no new work comes; what runs goes on.
func (e *Engine) Drain(ctx context.Context) error {
	if e.remote == nil {
		return nil
	}
	return e.remote.Drain(ctx)
}

// Close ends everything, also where ctx is over already.
func (e *Engine) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	var errs []error
	switch {
	case e.remote != nil:
		errs = append(errs, e.remote.Close(ctx))
	case e.Pipeline != nil:
		errs = append(errs, e.Pipeline.Close(ctx))
	}
	if e.catalog != nil {
		errs = append(errs, e.catalog.Close(ctx))
	}
	return errors.Join(errs...)
}

// StageSummary is one line of a plan that runs.
type StageSummary struct {
	Stage  int    `json:"stage"`
	Layers string `json:"layers"` // inclusive, as --pp-layers takes them
	Start  int    `json:"start"`  // half-open
	End    int    `json:"end"`
	Plugin string `json:"plugin"`
	Bytes  int64  `json:"bytes"` // held
}

// Plan returns what each stage holds.
func (e *Engine) Plan() []StageSummary {
	var out []StageSummary
	for _, s := range e.Pipeline.Stages() {
		r := s.LayerRange
		out = append(out, StageSummary{
			Stage: s.StageIndex, Layers: partition.FormatRanges([]sdk.LayerRange{r}), Start: r.Start, End: r.End,
			Plugin: strings.TrimSuffix(filepath.Base(s.Plugin), filepath.Ext(s.Plugin)), Bytes: s.Loaded.WeightBytes,
		})
	}
	return out
}

// Prompt turns a conversation into token ids by the model's template. Without a template, or with raw, the messages' texts
// are taken as they are, and the tokenizer adds its own special tokens.
func (e *Engine) Prompt(messages []chat.Message, raw bool) ([]int32, error) {
	var text strings.Builder
	for _, m := range messages {
		s, _ := m.Content.AsText()
		text.WriteString(s)
	}
	if raw || e.Template == nil {
		return e.Tokenizer.Encode(text.String(), true)
	}
	rendered, err := e.Template.Render(chat.Options{Messages: messages, AddGenerationPrompt: true})
	if err != nil {
		return nil, err
	}
	return e.Tokenizer.Encode(rendered, false) // the template writes the special tokens
}

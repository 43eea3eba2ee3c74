package sdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Echo is an executor of a middle stage that gives back the hidden rows that it gets, and keeps a record of its calls.
type Echo struct {
	Width        int                                      // of the boundary; float32
	Head         int                                      // vocabulary, when it plays the head stage
	OnStep       func(ctx context.Context, s *Step) error // before every step; nil does nothing
	OnLoad       func(ctx context.Context, progress func(LoadProgress)) error
	Capabilities []string
	Err          error // answers everything but Describe, Load and Step

	mu    sync.Mutex
	calls []string
}

// Fail makes everything that Err answers fail with err from now on.
func (e *Echo) Fail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Err = err
}

// Calls returns what was called so far.
func (e *Echo) Calls() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]string(nil), e.calls...)
}

func (e *Echo) record(format string, args ...any) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls = append(e.calls, fmt.Sprintf(format, args...))
	return e.Err
}

func (e *Echo) Describe(context.Context) (*Description, error) {
	return &Description{Name: "echo", Version: "1", ContractVersion: ContractVersion, Capabilities: e.Capabilities, Devices: []Device{{Kind: "cpu"}}}, nil
}

func (e *Echo) Inspect(_ context.Context, req InspectRequest) (*ModelProfile, error) {
	err := e.record("inspect %s", req.Dir)
	return &ModelProfile{Family: "echo", Boundary: Boundary{Width: e.Width, Dtype: DtypeFloat32}}, err
}

func (e *Echo) Load(ctx context.Context, _ LoadRequest, progress func(LoadProgress)) (*LoadReport, error) {
	if e.OnLoad != nil {
		if err := e.OnLoad(ctx, progress); err != nil {
			return nil, err
		}
	}
	return &LoadReport{Boundary: Boundary{Width: e.Width, Dtype: DtypeFloat32}, VocabSize: e.Head}, nil
}

func (e *Echo) Reserve(_ context.Context, r Reservation) error { return e.record("reserve %d", r.Seq) }

func (e *Echo) Release(_ context.Context, seq SeqID) error { return e.record("release %d", seq) }

// ExportState writes one section whose rows are zero.
func (e *Echo) ExportState(_ context.Context, seq SeqID, layers LayerRange, w *StateWriter) error {
	if err := e.record("export %d [%d, %d)", seq, layers.Start, layers.End); err != nil {
		return err
	}
	if err := w.Begin(3); err != nil {
		return err
	}
	rows, err := w.Section(StateSection{Layer: layers.Start, Kind: StateLatent, Dtype: DtypeFloat32, Rows: 3, KeyWidth: e.Width})
	if err != nil {
		return err
	}
	_, err = rows.Write(make([]byte, 12*e.Width))
	return err
}

func (e *Echo) ImportState(_ context.Context, seq SeqID, layers LayerRange, r *StateReader) error {
	for {
		section, rows, err := r.Next()
		if errors.Is(err, io.EOF) {
			return e.record("import %d [%d, %d)", seq, layers.Start, layers.End)
		}
		if err != nil {
			return err
		}
		if err := e.record("layer %d: %d bytes", section.Layer, len(rows)); err != nil {
			return err
		}
	}
}

func (e *Echo) Step(ctx context.Context, s *Step) (*StepResult, error) {
	if e.OnStep != nil {
		if err := e.OnStep(ctx, s); err != nil {
			return nil, err
		}
	}
	_ = e.record("step %d", s.ID)
	out := s.Hidden
	out.Data = s.Out[:len(s.Hidden.Data)]
	copy(out.Data, s.Hidden.Data)
	return &StepResult{ID: s.ID, Hidden: out}, nil
}

func (e *Echo) Import(_ context.Context, req ImportRequest) (*ImportPlan, error) {
	err := e.record("import %v", req.Metadata)
	return &ImportPlan{Family: req.Architecture}, err
}

func (e *Echo) Unload(context.Context) error { return e.record("unload") }

func (e *Echo) Stats(context.Context) (*Stats, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return &Stats{Steps: uint64(len(e.calls))}, e.Err
}

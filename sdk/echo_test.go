package sdk

import (
	"context"
	"fmt"
	"sync"
)

// Echo is an executor of a middle stage that gives back the hidden rows that it gets, and keeps a record of its calls.
type Echo struct {
	Width  int                                      // of the boundary; float32
	Head   int                                      // vocabulary, when it plays the head stage
	OnStep func(ctx context.Context, s *Step) error // before every step; nil does nothing
	OnLoad func(ctx context.Context, progress func(LoadProgress)) error
	Err    error // answers everything but Describe, Load and Step

	mu    sync.Mutex
	calls []string
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
	return &Description{Name: "echo", Version: "1", ContractVersion: ContractVersion, Devices: []Device{{Kind: "cpu"}}}, nil
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

func (e *Echo) Truncate(_ context.Context, seq SeqID, length int) error {
	return e.record("truncate %d to %d", seq, length)
}

func (e *Echo) Fork(_ context.Context, from, to SeqID) error {
	return e.record("fork %d to %d", from, to)
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
	return &Stats{Steps: uint64(len(e.Calls()))}, e.Err
}

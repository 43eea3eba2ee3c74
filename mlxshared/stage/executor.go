package stage

import (
	"context"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// Options configure an Executor.
type Options struct {
	Name     string // of the binary, e.g. "llama"
	Version  string // of the program
	Families []Family
	Device   string // mlx.DeviceAuto, mlx.DeviceCPU or mlx.DeviceGPU

	Logger hclog.Logger // its lines reach the host's log; nil logs nothing

	Now func() time.Time // nil takes time.Now
}

// Executor serves the contract for a list of families.
type Executor struct {
	o      Options
	worker *worker
	model  *loaded // touched by the worker only

	// What Stats reports while the worker is busy.
	isLoaded    atomic.Bool
	steps       atomic.Uint64
	sequences   atomic.Int64
	weightBytes atomic.Int64
	stateBytes  atomic.Int64
	busyNanos   atomic.Int64

	scratchBytes atomic.Int64 // kept beside weights and state for the next step
	peakBytes    atomic.Int64 // that weights, state and scratch took at most since the load
}

var _ sdk.Threaded = (*Executor)(nil)

// New makes an executor and starts its worker. Close ends it.
func New(o Options) *Executor {
	if o.Logger == nil {
		o.Logger = hclog.NewNullLogger()
	}
	return &Executor{o: o, worker: startWorker()}
}

// Close unloads and ends the worker. Nothing may be called on the executor any more.
func (e *Executor) Close() error {
	err := e.Unload(context.Background())
	e.worker.stop()
	return err
}

// Describe answers without the worker.
func (e *Executor) Describe(context.Context) (*sdk.Description, error) {
	d, err := mlx.DeviceInfo(e.o.Device)
	if err != nil {
		return nil, sdk.Errorf(sdk.CodeUnsupported, "%v", err)
	}
	invariant := d.Backend().Invariant()
	out := &sdk.Description{
		Name: e.o.Name, Version: e.o.Version, ContractVersion: sdk.ContractVersion, Runtime: "mlx " + mlx.Version(),
		Devices: []sdk.Device{{
			Kind: deviceKind(d), Name: d.Name, TotalMemory: clampBytes(d.TotalMemory), FreeMemory: clampBytes(d.FreeMemory),
			Numerics: sdk.Numerics{BatchInvariant: invariant, ChunkInvariant: invariant},
		}},
	}
	out.Capabilities = []string{
		sdk.CapabilityShare, sdk.CapabilityRewind, sdk.CapabilitySnapshots, sdk.CapabilityState, sdk.CapabilityMasks,
		sdk.CapabilityScores, sdk.CapabilityLogits,
	}
	for _, f := range e.o.Families {
		out.Families = append(out.Families, f.Info())
	}
	return out, nil
}

// deviceKind tells the two kinds of GPU apart by where they exist.
func deviceKind(d mlx.Device) string {
	switch {
	case d.Kind == mlx.DeviceCPU:
		return "cpu"
	case onApple:
		return "metal"
	}
	return "cuda"
}

func clampBytes(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// Stats answers without the worker.
func (e *Executor) Stats(context.Context) (*sdk.Stats, error) {
	return &sdk.Stats{
		Loaded: e.isLoaded.Load(), Steps: e.steps.Load(), Sequences: int(e.sequences.Load()), WeightBytes: e.weightBytes.Load(),
		StateBytes: e.stateBytes.Load(), ScratchBytes: e.scratchBytes.Load(), PeakBytes: e.peakBytes.Load(), ResidentBytes: sdk.ResidentBytes(), BusyNanos: e.busyNanos.Load(),
	}, nil
}

// Import asks the family that knows the container.
func (e *Executor) Import(_ context.Context, req sdk.ImportRequest) (*sdk.ImportPlan, error) {
	source := req.Format + ":" + req.Architecture
	var known []string
	for _, f := range e.o.Families {
		imports := f.Info().Imports
		known = append(known, imports...)
		if importer, ok := f.(Importer); ok && slices.Contains(imports, source) {
			return importer.Import(&req)
		}
	}
	return nil, sdk.Errorf(sdk.CodeUnsupported, "executor %s can't import %s; it imports %v", e.o.Name, source, known)
}

// Unload frees the model and every sequence.
func (e *Executor) Unload(ctx context.Context) error { return e.worker.do(ctx, e.unload) }

func (e *Executor) unload() error {
	if e.model == nil {
		return nil
	}
	err := e.model.close()
	e.model = nil
	e.o.Logger.Debug("unloaded")
	e.isLoaded.Store(false)
	for _, n := range []*atomic.Int64{&e.sequences, &e.weightBytes, &e.stateBytes, &e.scratchBytes, &e.peakBytes} {
		n.Store(0)
	}
	return err
}

// Reserve creates the state of a sequence.
func (e *Executor) Reserve(ctx context.Context, r sdk.Reservation) error {
	return e.change(ctx, func(m *loaded) error { return m.reserve(&r) })
}

// Release frees the state of a sequence; an unknown one is no error.
func (e *Executor) Release(ctx context.Context, seq sdk.SeqID) error {
	return e.change(ctx, func(m *loaded) error { m.release(seq); return nil })
}

// ExportState writes what a sequence keeps in the layers.
func (e *Executor) ExportState(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
	return e.change(ctx, func(m *loaded) error { return m.exportState(seq, layers, w) })
}

// ImportState fills layers of an empty sequence.
func (e *Executor) ImportState(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
	return e.change(ctx, func(m *loaded) error { return m.importState(seq, layers, r) })
}

// RunSteps has the worker read the step stream, so that a step runs where it was read.
func (e *Executor) RunSteps(loop *sdk.StepLoop) { e.worker.serve(loop) }

// Step runs one micro-batch.
func (e *Executor) Step(ctx context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	var out *sdk.StepResult
	err := e.change(ctx, func(m *loaded) (err error) {
		out, err = m.step(ctx, s)
		if out != nil {
			e.busyNanos.Add(out.ComputeNanos)
			e.steps.Add(1)
		}
		return err
	})
	return out, err
}

// change runs f on the worker with the loaded model and brings the counters up to date.
func (e *Executor) change(ctx context.Context, f func(*loaded) error) error {
	return e.worker.do(ctx, func() error {
		if e.model == nil {
			return sdk.Errorf(sdk.CodeNotLoaded, "no model is loaded")
		}
		err := f(e.model)
		e.model.count()
		e.sequences.Store(int64(len(e.model.sequences)))
		e.stateBytes.Store(e.model.held)
		e.scratchBytes.Store(e.model.scratch())
		e.peakBytes.Store(e.model.peak)
		return err
	})
}

// family finds the family that a config belongs to; name, if not empty, must be it.
func (e *Executor) family(c *config.Object, name string) (Family, string, error) {
	modelType := c.StringOr("model_type", "")
	if err := c.Err(); err != nil {
		return nil, "", err
	}
	var known []string
	for _, f := range e.o.Families {
		info := f.Info()
		known = append(known, info.ModelTypes...)
		if slices.Contains(info.ModelTypes, modelType) && (name == "" || name == info.Name) {
			return f, modelType, nil
		}
	}
	if name != "" {
		return nil, "", sdk.Errorf(sdk.CodeUnsupported, "executor %s: family %q does not take model_type %q of %s; model types here: %v", e.o.Name, name, modelType, config.FileName, known)
	}
	return nil, "", sdk.Errorf(sdk.CodeUnsupported, "executor %s: model_type %q of %s is not built; built are %v", e.o.Name, modelType, config.FileName, known)
}

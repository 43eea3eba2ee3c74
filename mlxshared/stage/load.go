package stage

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/sample"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
)

// cacheLimit bounds the memory that MLX keeps from one step for the next.
const cacheLimit = 64 << 20

// loaded is a stage with its weights. The worker owns it.
type loaded struct {
	stream *mlx.Stream
	loader *weights.Loader
	shape  Shape
	dtype  mlx.Dtype
	specs  []nn.StateSpec
	price  sdk.LayerProfile // the states of all layers together
	modules

	firstLayer int   // of the model
	layerSlots []int // first slot of each layer's states, then their number

	budget    int64 // bytes of state; 0 means no limit
	held      int64 // bytes of state; what sequences share once
	growing   int64 // bytes of state that reservations may still need
	freed     int64 // bytes of state since the heap was last trimmed with no sequence left
	trimmed   int64 // freed at the last trim since
	peak      int64 // bytes that weights, state and working memory took at most
	sequences map[sdk.SeqID]*sequence

	chooser   sample.Chooser
	positions []int32 // buffers of step
	tokens    []int32 //
	clock     clock
	logger    hclog.Logger
}

// modules are what a stage computes with.
type modules struct {
	embed  nn.Embedder // nil on a stage without the embedding
	layers []nn.Layer
	head   nn.Head // nil on a stage without the head
}

// Load reads the tensors of a layer range.
func (e *Executor) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (report *sdk.LoadReport, err error) {
	err = e.worker.do(ctx, func() error {
		if e.model != nil {
			return sdk.Errorf(sdk.CodeInvalid, "a model is loaded already; unload it first")
		}
		o, err := e.open(req.Dir, req.Family, req.Dtype)
		if err != nil {
			return err
		}
		report, err = e.load(ctx, o, &req, progress)
		return errors.Join(err, o.close())
	})
	if err != nil {
		return nil, err
	}
	return report, nil
}

func (e *Executor) load(ctx context.Context, o *opened, req *sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	if err := o.check(req); err != nil {
		return nil, err
	}
	threads := req.Threads
	if threads == 0 {
		threads = runtime.NumCPU()
	}
	stream, err := mlx.Open(mlx.Options{Device: e.o.Device, Threads: threads})
	if err != nil {
		return nil, sdk.Errorf(sdk.CodeInvalid, "%v", err)
	}
	stream.SetCacheLimit(cacheLimit)
	m := &loaded{
		stream: stream, shape: o.shape, dtype: o.dtype, firstLayer: req.Layers.Start, budget: req.KVBudget,
		sequences: map[sdk.SeqID]*sequence{}, clock: e.clock(), logger: e.o.Logger,
	}
	if err := m.build(ctx, o, req, progress); err != nil {
		return nil, errors.Join(m.typed(err), m.close())
	}
	e.model = m
	e.o.Logger.Debug("loaded", "family", o.family.Info().Name, "layers", fmt.Sprintf("[%d, %d)", req.Layers.Start, req.Layers.End),
		"bytes", m.loader.Bytes(), "tensors", m.loader.Tensors(), "threads", threads)
	e.isLoaded.Store(true)
	e.weightBytes.Store(m.loader.Bytes())
	return &sdk.LoadReport{WeightBytes: m.loader.Bytes(), Tensors: m.loader.Tensors(), Boundary: o.boundary(), VocabSize: o.shape.Vocab}, nil
}

// check refuses requests that the model or this executor can't serve.
func (o *opened) check(req *sdk.LoadRequest) error {
	r := req.Layers
	switch {
	case o.family.Info().PlanOnly:
		return sdk.Errorf(sdk.CodeUnsupported, "family %s can be planned but not run", o.family.Info().Name)
	case o.store == nil:
		return &sdk.Error{Code: sdk.CodeNotFound, File: req.Dir, Message: req.Dir + ": no model*.safetensors file; fetch the model again"}
	case r.Start < 0 || r.End > o.shape.Layers || r.Start >= r.End:
		return sdk.Errorf(sdk.CodeInvalid, "layers [%d, %d) asked of a model of %d layers; change --pp-layers", r.Start, r.End, o.shape.Layers)
	case !o.family.Info().Pipeline && r.End-r.Start != o.shape.Layers:
		return sdk.Errorf(sdk.CodeUnsupported, "family %s runs in one process only: no stage executor holds layers [%d, %d) of %d; use --pp-size 1 without --pp-layers",
			o.family.Info().Name, r.Start, r.End, o.shape.Layers)
	case o.cut(r) != nil:
		g := o.cut(r)
		return sdk.Errorf(sdk.CodeInvalid, "layers [%d, %d) part layer %d from layer %d: %s; change --pp-layers", r.Start, r.End, g.Source, g.Consumer, g.Reason)
	case req.HasEmbedding && r.Start != 0:
		return sdk.Errorf(sdk.CodeInvalid, "the embedding belongs to the stage with layer 0, not to layers [%d, %d)", r.Start, r.End)
	case req.HasHead && r.End != o.shape.Layers:
		return sdk.Errorf(sdk.CodeInvalid, "the head belongs to the stage with layer %d, not to layers [%d, %d)", o.shape.Layers-1, r.Start, r.End)
	case req.TPSize > 1:
		return sdk.Errorf(sdk.CodeUnsupported, "family %s has no tensor parallelism; use a group of one instead of %d", o.family.Info().Name, req.TPSize)
	case req.Adapter != "":
		return sdk.Errorf(sdk.CodeUnsupported, "family %s takes no adapter; remove --adapter %s", o.family.Info().Name, req.Adapter)
	case req.Device != 0:
		return sdk.Errorf(sdk.CodeInvalid, "device %d was asked for; this executor has device 0 only", req.Device)
	case req.Threads < 0:
		return sdk.Errorf(sdk.CodeInvalid, "threads is %d; use --threads 0 or more", req.Threads)
	case req.KVBudget < 0:
		return sdk.Errorf(sdk.CodeInvalid, "KV budget is %d bytes; want 0 or more", req.KVBudget)
	}
	return nil
}

// cut is an adjacency group that a bound of the range parts, nil if there is none.
func (o *opened) cut(r sdk.LayerRange) *sdk.AdjacencyGroup {
	for i := range o.shape.Adjacency {
		g := &o.shape.Adjacency[i]
		for _, bound := range []int{r.Start, r.End} {
			if g.Source < bound && bound <= g.Consumer {
				return g
			}
		}
	}
	return nil
}

// build loads the modules of the stage.
func (m *loaded) build(ctx context.Context, o *opened, req *sdk.LoadRequest, progress func(sdk.LoadProgress)) error {
	scope := m.stream.NewScope()
	defer scope.Close()
	b := &nn.Builder{Loader: o.loader(scope), Dtype: o.dtype}
	m.loader = b.Loader
	b.Context = ctx
	if progress != nil {
		planned := &nn.Builder{Loader: o.loader(nil), Dtype: o.dtype}
		o.assemble(planned, req, nil)
		total := planned.Bytes()
		b.Loaded = func(tensor string, bytes int64) {
			progress(sdk.LoadProgress{Loaded: bytes, Total: total, Tensor: tensor})
		}
	}
	m.modules = o.assemble(b, req, func(slots int) { m.layerSlots = append(m.layerSlots, slots) })
	b.Context, b.Loaded = nil, nil
	m.specs = b.States
	m.price.States = price(m.specs, m.stream.Backend())
	return b.Err()
}

// assemble makes the modules that the request asks for. before, if not nil, is told how many slots there are before each layer,
// and after the last.
func (o *opened) assemble(b *nn.Builder, req *sdk.LoadRequest, before func(slots int)) modules {
	if before == nil {
		before = func(int) {}
	}
	var m modules
	if req.HasEmbedding {
		m.embed = o.model.Embedding(b)
	}
	for i := req.Layers.Start; i < req.Layers.End; i++ {
		before(len(b.States))
		m.layers = append(m.layers, o.model.Layer(b, i))
	}
	before(len(b.States))
	if req.HasHead {
		m.head = o.model.Head(b)
	}
	return m
}

// close frees everything. It may be called on a half-built stage.
func (m *loaded) close() error {
	for id := range m.sequences {
		m.release(id)
	}
	if m.loader != nil {
		m.loader.Free()
	}
	return m.stream.Close()
}

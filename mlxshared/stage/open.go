package stage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// opened is a model folder whose config and headers were read and found to agree.
type opened struct {
	backend   mlx.Backend // of the device that stages load on
	family    Family
	modelType string
	model     Model
	shape     Shape
	store     *weights.Store // nil without weight files
	rules     weights.Rules
	plain     mlx.Dtype // the config's word on the checkpoint's type
	dtype     mlx.Dtype // of activations
	plan      plan
}

// MaxLayers bounds what a broken config can make a plan of.
const MaxLayers = 1 << 14

// plan is what each part of the model holds once loaded.
type plan struct {
	embedding    int64 // bytes
	layers       []layerPlan
	head         int64
	tied         int64 // of head, within embedding
	quantization string
}

type layerPlan struct {
	kind    string
	weights int64
	states  []sdk.StateProfile
}

// open reads a model folder without its tensors' data. A folder without weight files gives estimates.
func (e *Executor) open(dir, family string, dtype sdk.Dtype) (*opened, error) {
	c, err := config.Read(dir)
	if err != nil {
		return nil, err
	}
	device, err := mlx.DeviceInfo(e.o.Device)
	if err != nil {
		return nil, sdk.Errorf(sdk.CodeUnsupported, "%v", err)
	}
	o := &opened{backend: device.Backend()}
	if o.family, o.modelType, err = e.family(c, family); err != nil {
		return nil, err
	}
	o.model = o.family.Model(c)
	o.rules = weights.ReadRules(c)
	o.plain = plainDtype(c)
	if err := c.Err(); err != nil {
		return nil, err
	}
	if o.shape = o.model.Shape(); o.shape.Layers > MaxLayers {
		return nil, sdk.Errorf(sdk.CodeInvalid, "%s asks for %d layers; at most %d are believed", config.FileName, o.shape.Layers, MaxLayers)
	}
	switch o.store, err = weights.Open(dir); {
	case errors.Is(err, safetensors.ErrNoWeights):
		o.store = nil
	case err != nil:
		return nil, err
	}
	if err := o.makePlan(dtype); err != nil {
		return nil, errors.Join(err, o.close())
	}
	return o, nil
}

func (o *opened) close() error {
	if o.store == nil {
		return nil
	}
	return o.store.Close()
}

// plainDtype reads torch_dtype, or transformers' newer dtype.
func plainDtype(c *config.Object) mlx.Dtype {
	key := "torch_dtype"
	if !c.Has(key) {
		key = "dtype"
	}
	d, err := mlx.ParseDtype(c.OneOf(key, "bfloat16", "float32", "float16", "bfloat16"))
	if err != nil {
		return mlx.BFloat16 // OneOf has recorded the fault
	}
	return d
}

func (o *opened) loader(scope *mlx.Scope) *weights.Loader {
	return weights.NewLoader(weights.Options{Store: o.store, Rules: o.rules, Names: o.shape.Names, Plain: o.plain, Scope: scope})
}

// makePlan asks for every tensor of the model without reading one, which checks names, types and shapes.
func (o *opened) makePlan(dtype sdk.Dtype) error {
	b := &nn.Builder{Loader: o.loader(nil)}
	o.model.Embedding(b)
	o.plan.embedding = b.Bytes()
	var err error
	if o.dtype, err = activationDtype(dtype, b.MatrixDtype(o.shape.EmbeddingPath)); err != nil {
		return errors.Join(b.Err(), err)
	}
	b.Dtype = o.dtype
	for i := range o.shape.Layers {
		bytes, states := b.Bytes(), len(b.States)
		layer := o.model.Layer(b, i)
		if b.Err() != nil {
			return b.Err()
		}
		o.plan.layers = append(o.plan.layers, layerPlan{kind: layer.Kind(), weights: b.Bytes() - bytes, states: price(b.States[states:], o.backend)})
	}
	bytes := b.Bytes()
	o.model.Head(b)
	shown := b.Bytes() - bytes
	if err := b.CheckUnused(&o.shape.Names); err != nil {
		return err
	}
	o.plan.quantization = b.Quantization()
	if err := o.checkPackings(b.Packings()); err != nil {
		return err
	}
	head := &nn.Builder{Loader: o.loader(nil), Dtype: o.dtype} // a loader of its own: a tied projection counts again
	o.model.Head(head)
	o.plan.head = head.Bytes()
	o.plan.tied = o.plan.head - shown
	return head.Err()
}

// price asks each state for what it costs on a back end.
func price(specs []nn.StateSpec, on mlx.Backend) []sdk.StateProfile {
	var states []sdk.StateProfile
	for _, s := range specs {
		states = append(states, s.Profile(on))
	}
	return states
}

// checkPackings refuses quantizations that the family does not say it runs.
func (o *opened) checkPackings(packings []string) error {
	info := o.family.Info()
	for _, p := range packings {
		if !slices.Contains(info.Quantizations, p) {
			return sdk.Errorf(sdk.CodeUnsupported, "family %s does not run weights packed as %s; it runs %s; convert the model with mlx_lm.convert",
				info.Name, p, strings.Join(info.Quantizations, ", "))
		}
	}
	return nil
}

func activationDtype(asked sdk.Dtype, own mlx.Dtype) (mlx.Dtype, error) {
	if asked == sdk.DtypeAuto {
		return own, nil
	}
	if d := ownDtype(asked); d != mlx.Int32 {
		return d, nil
	}
	return 0, sdk.Errorf(sdk.CodeInvalid, "activations can't be %v; use --dtype auto, float32, bfloat16 or float16", asked)
}

func contractDtype(d mlx.Dtype) sdk.Dtype {
	switch d {
	case mlx.Float16:
		return sdk.DtypeFloat16
	case mlx.BFloat16:
		return sdk.DtypeBFloat16
	}
	return sdk.DtypeFloat32
}

// ownDtype is contractDtype's inverse; what neither activations nor states have is an integer.
func ownDtype(d sdk.Dtype) mlx.Dtype {
	switch d {
	case sdk.DtypeFloat16:
		return mlx.Float16
	case sdk.DtypeBFloat16:
		return mlx.BFloat16
	case sdk.DtypeFloat32:
		return mlx.Float32
	}
	return mlx.Int32
}

// Inspect profiles a model from its headers, or from its config alone.
func (e *Executor) Inspect(_ context.Context, req sdk.InspectRequest) (*sdk.ModelProfile, error) {
	o, err := e.open(req.Dir, "", req.Dtype)
	if err != nil {
		return nil, err
	}
	if err := o.close(); err != nil {
		return nil, fmt.Errorf("closing %s: %w", req.Dir, err)
	}
	return o.profile(), nil
}

func (o *opened) profile() *sdk.ModelProfile {
	p := &sdk.ModelProfile{
		Family: o.family.Info().Name, ModelType: o.modelType,
		Embedding: o.plan.embedding, Head: o.plan.head, Tied: o.plan.tied > 0, TiedBytes: o.plan.tied,
		Adjacency: o.shape.Adjacency, Boundary: o.boundary(),
		ContextLength: o.shape.Context, VocabSize: o.shape.Vocab, HiddenSize: o.shape.Width,
		Quantization: o.plan.quantization, Exact: o.store != nil,
	}
	for i := range o.plan.layers {
		l := &o.plan.layers[i]
		p.Layers = append(p.Layers, sdk.LayerProfile{Kind: l.kind, Weights: l.weights, States: l.states})
	}
	return p
}

func (o *opened) boundary() sdk.Boundary {
	return sdk.Boundary{Width: o.shape.boundaryWidth(), Dtype: contractDtype(o.dtype)}
}

package stagetest

import (
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/sdktest"
)

// New makes an executor on the CPU, which the test's end closes.
func New(t testing.TB, families []stage.Family) *stage.Executor {
	t.Helper()
	e := stage.New(stage.Options{Name: "test", Version: "test", Families: families, Device: mlx.DeviceCPU})
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return e
}

// Conformance runs the contract's own checks on the checkpoint dir with as many of its cuts.
func Conformance(t *testing.T, families []stage.Family, dir, family string, cuts int, dtypes ...sdk.Dtype) {
	sdktest.Run(t, sdktest.Config{
		New:      func(hclog.Logger) sdk.Executor { return New(t, families) },
		ModelDir: dir, Family: family, Dtypes: dtypes, Cuts: cuts,
	})
}

// Inspect profiles the folder dir.
func Inspect(t testing.TB, families []stage.Family, dir string) *sdk.ModelProfile {
	t.Helper()
	p, err := New(t, families).Inspect(t.Context(), sdk.InspectRequest{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Kinds lists the layers' kinds.
func Kinds(p *sdk.ModelProfile) string {
	kinds := make([]string, len(p.Layers))
	for i, l := range p.Layers {
		kinds[i] = l.Kind
	}
	return strings.Join(kinds, " ")
}

// Weights is the bytes of the whole model.
func Weights(p *sdk.ModelProfile) int64 {
	n := p.Embedding + p.Head - p.TiedBytes
	for _, l := range p.Layers {
		n += l.Weights
	}
	return n
}

// Parameters prices the published config of a model and wants so many billions of parameters, give or take a share of them.
func Parameters(t *testing.T, families []stage.Family, name string, config map[string]any, billions, share float64) {
	t.Helper()
	const bytes = 2 // of a parameter in 16 bits
	got := float64(Weights(Inspect(t, families, Bare(t, config)))) / bytes / 1e9
	if math.Abs(got-billions) > share*billions {
		t.Errorf("%s: %.2f billion parameters, want %.1f", name, got, billions)
	}
}

// PlanFromConfig compares what the config of the checkpoint dir tells alone with what the headers tell, part by part. Bytes may
// differ by so large a share.
func PlanFromConfig(t *testing.T, families []stage.Family, dir string, tolerance float64) {
	t.Helper()
	exact, estimate := Inspect(t, families, dir), Inspect(t, families, Bare(t, ReadConfig(t, dir, nil)))
	if !exact.Exact || estimate.Exact {
		t.Errorf("exact is %v with weights, %v without", exact.Exact, estimate.Exact)
	}
	same := func(what string, got, want int64) {
		if math.Abs(float64(got-want)) > tolerance*float64(want) {
			t.Errorf("%s: %d bytes from the config, %d from the headers", what, got, want)
		}
	}
	same("embedding", estimate.Embedding, exact.Embedding)
	same("head", estimate.Head, exact.Head)
	same("tied", estimate.TiedBytes, exact.TiedBytes)
	if len(estimate.Layers) != len(exact.Layers) || estimate.Boundary != exact.Boundary || !slices.Equal(estimate.Adjacency, exact.Adjacency) {
		t.Fatalf("%+v from the config, %+v from the headers", estimate, exact)
	}
	for i, l := range exact.Layers {
		e := estimate.Layers[i]
		same(l.Kind, e.Weights, l.Weights)
		if e.Weights = l.Weights; !reflect.DeepEqual(e, l) {
			t.Errorf("layer %d: %+v from the config, %+v from the headers", i, e, l)
		}
	}
}

// Refusing returns what tries a change of a checkpoint's config (as for ReadConfig) that Inspect must refuse with the code and
// the words; root holds the checkpoints.
func Refusing(t *testing.T, families []stage.Family, root string) func(checkpoint string, changes map[string]any, code sdk.Code, want string) {
	t.Helper()
	e := New(t, families)
	return func(checkpoint string, changes map[string]any, code sdk.Code, want string) {
		t.Helper()
		dir := Bare(t, ReadConfig(t, filepath.Join(root, checkpoint), changes))
		if _, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: dir}); !Is(err, code, want) {
			t.Errorf("%s with %v: %v, want %v with %q", checkpoint, changes, err, code, want)
		}
	}
}

// Is tells whether an error has the code and says so.
func Is(err error, code sdk.Code, want string) bool {
	return err != nil && sdk.CodeOf(err) == code && strings.Contains(err.Error(), want)
}

// numbers are those of layers and experts within a tensor's name.
var numbers = regexp.MustCompile(`\.\d+\.`)

// MissingTensors takes tensors away from the checkpoint dir, one of each kind at a time, which Inspect must refuse with a tensor's
// name: nothing runs on what is not there. Those whose names have one of the parts aside are not needed.
func MissingTensors(t *testing.T, families []stage.Family, dir string, aside ...string) {
	all, tried := ReadTensors(t, dir), map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		kind := numbers.ReplaceAllString(name, ".N.")
		if tried[kind] {
			continue
		}
		tried[kind] = true
		left := Bare(t, ReadConfig(t, dir, nil))
		x := all[name]
		delete(all, name)
		WriteTensors(t, left, all)
		all[name] = x
		_, err := New(t, families).Inspect(t.Context(), sdk.InspectRequest{Dir: left})
		if slices.ContainsFunc(aside, func(part string) bool { return strings.Contains(name, part) }) {
			if err != nil {
				t.Errorf("without %s, which is not needed: %v", name, err)
			}
			continue
		}
		fault, ok := errors.AsType[*sdk.Error](err)
		if !ok || fault.Code != sdk.CodeNotFound && fault.Code != sdk.CodeCorrupt || !strings.Contains(fault.Message, fault.Tensor) || fault.Tensor == "" {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

// FuzzConfigs feeds every family any config: it records faults, or describes a model whose layers can be priced. The seeds are
// the configs of checkpoints in root, and more.
func FuzzConfigs(f *testing.F, families []stage.Family, root string, checkpoints []string, more ...string) {
	for _, name := range checkpoints {
		raw, err := os.ReadFile(filepath.Join(root, name, config.FileName))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	for _, text := range more {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, family := range families {
			o, err := config.Parse(raw, config.FileName)
			if err != nil {
				return
			}
			if m := family.Model(o); o.Err() == nil {
				price(t, family, m)
			}
		}
	})
}

func price(t *testing.T, family stage.Family, m stage.Model) {
	s, name := m.Shape(), family.Info().Name
	if s.Layers < 1 || s.Width < 1 || s.Vocab < 1 {
		t.Fatalf("%s: %+v passed", name, s)
	}
	b := &nn.Builder{Loader: weights.NewLoader(weights.Options{Plain: mlx.BFloat16, Names: s.Names}), Dtype: mlx.BFloat16}
	m.Embedding(b)
	for i := range min(s.Layers, 5) {
		if kind := m.Layer(b, i).Kind(); kind == "" {
			t.Fatalf("%s: layer %d has no kind", name, i)
		}
	}
	m.Head(b)
	if b.Err() == nil && b.Bytes() < 1 {
		t.Fatalf("%s: %d bytes", name, b.Bytes())
	}
}

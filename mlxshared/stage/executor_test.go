package stage

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// bigram is the smallest family: its logits are a linear map of the last token's embedding. Its layers add nothing, adds
// times over; during runs within their Forward.
type bigram struct {
	layers int
	adds   int
	during func()
}

const (
	bigramWidth = 32
	bigramVocab = 48
)

func (b bigram) Info() sdk.Family {
	return sdk.Family{Name: "bigram", ModelTypes: []string{"bigram"}, Pipeline: true, Quantizations: []string{"none"}}
}

func (b bigram) Model(c *config.Object) Model {
	b.layers = c.Size("num_hidden_layers")
	return b
}

func (b bigram) Shape() Shape {
	return Shape{Layers: b.layers, Width: bigramWidth, Vocab: bigramVocab, EmbeddingPath: "embed"}
}

func (b bigram) Embedding(l *nn.Builder) nn.Embedder {
	return nn.NewEmbedding(l, "embed", bigramVocab, bigramWidth)
}
func (b bigram) Layer(*nn.Builder, int) nn.Layer { return bigramLayer(b) }
func (b bigram) Head(l *nn.Builder) nn.Head {
	return nn.NewLMHead(l, nn.NewRMSNorm(l, "norm", bigramWidth, 1e-5), "head", bigramVocab, bigramWidth)
}

type bigramLayer bigram

func (l bigramLayer) Kind() string { return "identity" }
func (l bigramLayer) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	if l.during != nil {
		l.during()
	}
	for range l.adds {
		x = p.Add(x, p.Sub(x, x))
	}
	return x
}

// bigramModel writes a checkpoint of zeros.
func bigramModel(t *testing.T, layers int) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, config.FileName), fmt.Appendf(nil, `{"model_type": "bigram", "num_hidden_layers": %d}`, layers), 0o600); err != nil {
		t.Fatal(err)
	}
	zeros := func(name string, shape ...int64) safetensors.Entry {
		size := int64(4)
		for _, d := range shape {
			size *= d
		}
		return safetensors.Entry{Name: name + ".weight", Dtype: "F32", Shape: shape, Write: func(w io.Writer) error {
			_, err := w.Write(make([]byte, size))
			return err
		}}
	}
	entries := []safetensors.Entry{zeros("embed", bigramVocab, bigramWidth), zeros("norm", bigramWidth), zeros("head", bigramVocab, bigramWidth)}
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), nil, entries); err != nil {
		t.Fatal(err)
	}
	return dir
}

func load(t *testing.T, f Family, layers int) *Executor {
	t.Helper()
	dir := bigramModel(t, layers)
	e := New(Options{Name: "test", Version: "test", Families: []Family{f}, Device: mlx.DeviceCPU})
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	req := sdk.LoadRequest{Dir: dir, Family: "bigram", Layers: sdk.LayerRange{End: layers}, HasEmbedding: true, HasHead: true, Threads: 1}
	if _, err := e.Load(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	return e
}

func step(tokens ...int32) *sdk.Step {
	return &sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(tokens), Tokens: tokens, Want: sdk.WantToken}}}
}

func TestAnswersWhileAStepRuns(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	first := true
	during := func() {
		if first {
			first = false
			close(entered)
			<-leave
		}
	}
	e := load(t, bigram{during: during}, 2)
	if err := e.Reserve(t.Context(), sdk.Reservation{Seq: 1}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := e.Step(t.Context(), step(1, 2, 3))
		done <- err
	}()
	<-entered
	s, err := e.Stats(t.Context())
	if err != nil || !s.Loaded || s.Steps != 0 || s.Sequences != 1 {
		t.Errorf("stats within a step: %+v %v", s, err)
	}
	if _, err := e.Describe(t.Context()); err != nil {
		t.Errorf("describe within a step: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.Release(ended, 1); sdk.CodeOf(err) != sdk.CodeCanceled {
		t.Errorf("a call that gave up while it waited: %v", err)
	}
	close(leave)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if s, err = e.Stats(t.Context()); err != nil || s.Steps != 1 || s.BusyNanos <= 0 {
		t.Errorf("stats after the step: %+v %v", s, err)
	}
}

// All logits are equal, so greedy takes the lowest id and every token has the same probability.
func TestUniformLogits(t *testing.T) {
	e := load(t, bigram{}, 2)
	if err := e.Reserve(t.Context(), sdk.Reservation{Seq: 1}); err != nil {
		t.Fatal(err)
	}
	s := step(5)
	s.Seqs[0].TopN = 2
	r, err := e.Step(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	got := r.Seqs[0]
	if got.Token != 0 || len(got.Top) != 2 || got.Top[1].Token != 1 || got.Top[0].Logprob != got.Logprob || got.Logprob > -3.87 || got.Logprob < -3.88 {
		t.Errorf("%+v, want token 0 at ln(1/48)", got)
	}
	for pos, asked := range []bool{false, true} {
		s := step(5)
		s.Seqs[0].Pos, s.Seqs[0].Logprob = 1+pos, asked
		r, err := e.Step(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		want := sdk.SeqResult{Seq: 1}
		if asked {
			want.Logprob = got.Logprob
		}
		if !reflect.DeepEqual(r.Seqs[0], want) {
			t.Errorf("log-probability asked for: %v: %+v, want %+v", asked, r.Seqs[0], want)
		}
	}
}

// A long chunk's activations die with their layer: the peak does not grow with the number of layers.
func TestPeakOfALongChunk(t *testing.T) {
	peak := func(layers int) uint64 {
		e := load(t, bigram{adds: 8}, layers)
		if err := e.Reserve(t.Context(), sdk.Reservation{Seq: 1}); err != nil {
			t.Fatal(err)
		}
		s := e.model.stream // the worker is idle
		s.ResetPeakMemory()
		before := s.MemoryInUse()
		if _, err := e.Step(t.Context(), step(make([]int32, 4096)...)); err != nil {
			t.Fatal(err)
		}
		return s.PeakMemory() - before
	}
	few, many := peak(2), peak(32)
	if rows := uint64(4096 * bigramWidth * 4); few < rows || many > few+rows {
		t.Errorf("peak of %d bytes over 32 layers, %d over 2; one layer's rows are %d", many, few, rows)
	}
}

func TestTooManyLayers(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, config.FileName), []byte(`{"model_type": "bigram", "num_hidden_layers": 1000000000}`), 0o600); err != nil {
		t.Fatal(err)
	}
	e := New(Options{Name: "test", Families: []Family{bigram{}}, Device: mlx.DeviceCPU})
	defer e.Close()
	if _, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: dir}); err == nil || !strings.Contains(err.Error(), "1000000000 layers") {
		t.Errorf("%v", err)
	}
}

func TestNoFamilies(t *testing.T) {
	e := New(Options{Name: "empty", Version: "test", Device: mlx.DeviceCPU})
	defer e.Close()
	d, err := e.Describe(t.Context())
	if err != nil || len(d.Families) != 0 {
		t.Errorf("%+v %v", d, err)
	}
	if _, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: bigramModel(t, 1)}); sdk.CodeOf(err) != sdk.CodeUnsupported {
		t.Errorf("inspect: %v", err)
	}
}

// What a family does not say it runs is refused before anything is loaded.
func TestQuantizationThatTheFamilyDoesNotRun(t *testing.T) {
	dir := t.TempDir()
	raw := []byte(`{"model_type": "bigram", "num_hidden_layers": 1, "quantization": {"bits": 4, "group_size": 32}}`)
	if err := os.WriteFile(filepath.Join(dir, config.FileName), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	e := New(Options{Name: "test", Version: "test", Families: []Family{bigram{}}, Device: mlx.DeviceCPU})
	_, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: dir})
	if sdk.CodeOf(err) != sdk.CodeUnsupported || !strings.Contains(err.Error(), "family bigram does not run weights packed as affine-4; it runs none") {
		t.Errorf("%v", err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

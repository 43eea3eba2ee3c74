package nn

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// What a state exports makes the same state again, on either back end, and other sections are refused.
func TestExport(t *testing.T) {
	backends := map[string]*mlx.Stream{"kernels": open(t)}
	other, err := mlx.Open(mlx.Options{Device: mlx.DeviceCPU, Backend: mlx.BackendMLX, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	backends["mlx"] = other
	t.Cleanup(func() {
		if err := other.Close(); err != nil {
			t.Error(err)
		}
	})
	for name, spec := range map[string]KVSpec{
		"full":    {KVHeads: 2, KeyDim: 20, ValueDim: 32, Dtype: mlx.BFloat16},
		"float32": {KVHeads: 1, KeyDim: 16, ValueDim: 16, Dtype: mlx.Float32},
		"sliding": {KVHeads: 2, KeyDim: 16, ValueDim: 16, Sliding: 100, Dtype: mlx.BFloat16},
		"latent":  {KVHeads: 1, KeyDim: 48, ValueDim: 32, Latent: true, Dtype: mlx.BFloat16},
	} {
		for from, s := range backends {
			for to, s2 := range backends {
				t.Run(name+" "+from+" to "+to, func(t *testing.T) { exportKV(t, spec, s, s2) })
			}
		}
	}
}

func exportKV(t *testing.T, spec KVSpec, s, s2 *mlx.Stream) {
	make := func(s *mlx.Stream) State {
		state, err := spec.New(s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(state.Free)
		return state
	}
	state := make(s)
	const length = 700
	appendRows(t, s, spec, state, 0, length)
	section, first := state.Section(), spec.firstKept(length, s.Backend().CacheBlock())
	if section.First != first || section.Rows != length-first {
		t.Fatalf("%+v, want positions [%d, %d)", section, first, length)
	}
	var out bytes.Buffer
	if err := state.Export(&out); err != nil || int64(out.Len()) != section.Bytes() {
		t.Fatalf("%d bytes of %d: %v", out.Len(), section.Bytes(), err)
	}
	copied := make(s2)
	if err := copied.Import(section, length, bytes.NewReader(out.Bytes())); err != nil {
		t.Fatal(err)
	}
	if copied.Len() != length || copied.Section() != section {
		t.Errorf("%d positions, %+v; want %d, %+v", copied.Len(), copied.Section(), length, section)
	}
	var again bytes.Buffer
	if err := copied.Export(&again); err != nil || !bytes.Equal(again.Bytes(), out.Bytes()) {
		t.Errorf("the copy exports something else (%v)", err)
	}
	appendRows(t, s2, spec, copied, length, 1)

	if err := copied.Import(section, length, bytes.NewReader(out.Bytes())); sdk.CodeOf(err) != sdk.CodeInvalid {
		t.Errorf("into a full state: %v", err)
	}
	for name, change := range map[string]func(*Section){
		"kind":   func(s *Section) { s.Kind = sdk.StateRecurrent },
		"dtype":  func(s *Section) { s.Dtype = mlx.Float16 },
		"first":  func(s *Section) { s.First++ },
		"rows":   func(s *Section) { s.Rows-- },
		"keys":   func(s *Section) { s.KeyWidth++ },
		"values": func(s *Section) { s.ValueWidth++ },
		"gone":   func(s *Section) { s.First, s.Rows = length, 0 },
	} {
		bad := section
		change(&bad)
		if err := make(s2).Import(bad, length, bytes.NewReader(out.Bytes())); sdk.CodeOf(err) != sdk.CodeInvalid {
			t.Errorf("another %s: %v", name, err)
		}
	}
	short := bytes.NewReader(out.Bytes()[:out.Len()-1])
	if err := make(s2).Import(section, length, short); !errors.Is(err, io.EOF) {
		t.Errorf("a byte too few: %v", err)
	}
}

func TestExportRecurrent(t *testing.T) {
	for _, backend := range []mlx.Backend{mlx.BackendKernels, mlx.BackendMLX} {
		s, err := mlx.Open(mlx.Options{Device: mlx.DeviceCPU, Backend: backend, Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		spec := RecurrentSpec{Rows: 3, Cols: 20, Dtype: mlx.BFloat16}
		var states [2]State
		for i := range states {
			if states[i], err = spec.New(s); err != nil {
				t.Fatal(err)
			}
		}
		section := states[0].Section()
		data := make([]byte, section.Bytes())
		for i := range data {
			data[i] = byte(i)
		}
		if err := states[0].Import(section, 7, bytes.NewReader(data)); err != nil || states[0].Len() != 7 {
			t.Fatalf("%v, %d positions", err, states[0].Len())
		}
		var out bytes.Buffer
		if err := states[0].Export(&out); err != nil || !bytes.Equal(out.Bytes(), data) {
			t.Errorf("%s: exported %x, imported %x (%v)", backend, out.Bytes(), data, err)
		}
		bad := section
		bad.Rows++
		if err := states[1].Import(bad, 7, bytes.NewReader(data)); sdk.CodeOf(err) != sdk.CodeInvalid {
			t.Errorf("another shape: %v", err)
		}
		if err := states[1].Import(section, 7, bytes.NewReader(data[1:])); !errors.Is(err, io.EOF) {
			t.Errorf("a byte too few: %v", err)
		}
		for _, state := range states {
			state.Free()
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

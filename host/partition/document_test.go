package partition

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

func schema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	s, err := jsonschema.NewCompiler().Compile("../../docs/plan.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// document plans and returns what is written down, also as its JSON text.
func document(t *testing.T, r Request) (*Document, []byte) {
	t.Helper()
	plan, err := New(r)
	if err != nil {
		t.Fatal(err)
	}
	fits, err := WhatFits(r)
	if err != nil {
		t.Fatal(err)
	}
	d := NewDocument(r, plan, fits)
	text, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return d, text
}

func TestDocumentKeepsToItsSchema(t *testing.T) {
	gemma := Request{Profile: gemma4E2B(), Demand: Demand{4096, 2}, Hardware: Separate([]int64{4 << 30, 8 << 30})}
	manual := gemma
	manual.Ranges = []sdk.LayerRange{{Start: 0, End: 5}, {Start: 5, End: 35}}
	unknown := gemma
	unknown.Hardware = Local(3, Memory{Name: "local", Budget: Unlimited})
	tight := gemma
	tight.Hardware = Local(2, Memory{Name: "local", Budget: 1 << 20, Advisory: true})
	fast := gemma
	fast.Objective, fast.Speeds = ObjectiveSpeed, []float64{1, 2}
	bare := Request{Profile: &sdk.ModelProfile{Layers: []sdk.LayerProfile{{}}}, Demand: Demand{1, 1}, Hardware: Separate([]int64{1})}
	for name, r := range map[string]Request{"automatic": gemma, "manual": manual, "nothing known": unknown, "does not fit": tight, "speed": fast, "bare": bare} {
		_, text := document(t, r)
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := schema(t).Validate(value); err != nil {
			t.Errorf("%s: %v\n%s", name, err, text)
		}
	}
	if value, _ := jsonschema.UnmarshalJSON(bytes.NewReader([]byte(`{"model": "m"}`))); schema(t).Validate(value) == nil {
		t.Error("the schema takes anything")
	}
}

func TestDocumentSumsUp(t *testing.T) {
	r := Request{Profile: gemma4E2B(), Demand: Demand{4096, 2}, Hardware: Separate([]int64{4 << 30, 8 << 30})}
	d, _ := document(t, r)
	for i, s := range d.Stages {
		want := Load{}
		for _, l := range d.Profile.Layers[s.Start:s.End] {
			want = want.plus(Load{l.Weights, l.KV, l.State})
		}
		if s.HasEmbedding {
			want.Weights += d.Profile.Embedding
		}
		if s.HasHead {
			want.Weights += d.Profile.Head
		}
		if got := (Load{s.Weights, s.KV, s.State}); got != want || s.Load != want.Total() || *s.Budget != r.Hardware.Memories[i].Budget {
			t.Errorf("stage %d: %+v, want %+v", i, s, want)
		}
	}
	sliding, full := d.Profile.Layers[0].KV, d.Profile.Layers[4].KV
	if sliding != 512*512*2 || full != 1024*4096*2 {
		t.Errorf("KV of a sliding layer %d, of a full one %d", sliding, full)
	}
	if d.Manual || d.Objective != ObjectiveMemory || !d.Fits || len(d.Profile.Adjacency) != 20 {
		t.Errorf("%+v", d)
	}
}

func TestFitsText(t *testing.T) {
	d := &Document{Context: 10, Sequences: 1, Profile: DocumentModel{ContextLength: 20}}
	for want, fits := range map[string]DocumentFits{
		"any context for 1 sequence, or any number of sequences of 10 tokens":                        {},
		"a context of 15 tokens for 1 sequence, or 1 sequence of 10 tokens":                          {new(15), new(1)},
		"a context of 20 tokens (the model's own limit) for 1 sequence, or 3 sequences of 10 tokens": {new(20), new(3)},
		"a context of 0 tokens for 1 sequence, or 0 sequences of 10 tokens":                          {new(0), new(0)},
	} {
		d.WhatFits = fits
		if got := d.FitsText(); got != want {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
}

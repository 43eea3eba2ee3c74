package partition

import (
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// Document is a plan as data: docs/plan.schema.json describes it. All sizes are in bytes.
type Document struct {
	Model     string         `json:"model"` // folder
	Family    string         `json:"family"`
	ModelType string         `json:"model_type"`
	PlanOnly  bool           `json:"plan_only"` // no executor runs the family
	Context   int            `json:"context"`   // tokens of each sequence that the caches are sized for
	Sequences int            `json:"sequences"`
	Objective Objective      `json:"objective"`
	Manual    bool           `json:"manual"` // the ranges are the operator's
	Profile   DocumentModel  `json:"profile"`
	Stages    []DocumentPart `json:"stages"`
	Imbalance float64        `json:"imbalance"` // load of the heaviest stage over the lightest's; 0 when that has none
	Fits      bool           `json:"fits"`
	WhatFits  DocumentFits   `json:"what_fits"`
	Warnings  []string       `json:"warnings"`
}

// DocumentModel is the profile of a Document, its caches sized for the asked context and sequences.
type DocumentModel struct {
	Layers        []DocumentLayer `json:"layers"`
	Embedding     int64           `json:"embedding_bytes"`
	Head          int64           `json:"head_bytes"`
	Tied          bool            `json:"tied"`
	TiedBytes     int64           `json:"tied_bytes"` // of head and embedding both
	Adjacency     []DocumentGroup `json:"adjacency_groups"`
	ContextLength int             `json:"context_length"` // 0 when unbounded
	Quantization  string          `json:"quantization"`
	Exact         bool            `json:"exact"` // from the weights' headers, not estimated from config.json
}

// DocumentLayer is one layer of a DocumentModel.
type DocumentLayer struct {
	Kind    string `json:"kind"`
	Weights int64  `json:"weight_bytes"`
	KV      int64  `json:"kv_bytes"`
	State   int64  `json:"state_bytes"`
}

// DocumentGroup is one adjacency group of a DocumentModel.
type DocumentGroup struct {
	Source   int    `json:"source"`
	Consumer int    `json:"consumer"`
	Reason   string `json:"reason"`
}

// DocumentPart is one stage of a Document.
type DocumentPart struct {
	Stage        int    `json:"stage"`
	Device       string `json:"device"`
	Memory       string `json:"memory"` // stages with the same share one budget
	Layers       string `json:"layers"` // inclusive, as --pp-layers takes them
	Start        int    `json:"start"`  // half-open
	End          int    `json:"end"`
	HasEmbedding bool   `json:"has_embedding"`
	HasHead      bool   `json:"has_head"`
	Load         int64  `json:"load_bytes"` // the sum of the next three
	Weights      int64  `json:"weight_bytes"`
	KV           int64  `json:"kv_bytes"`
	State        int64  `json:"state_bytes"`
	Budget       *int64 `json:"budget_bytes"` // null where nothing limits it
}

// DocumentFits is what the same hardware holds at most; null means no limit, 0 that not even one fits.
type DocumentFits struct {
	Context   *int `json:"context"`
	Sequences *int `json:"sequences"`
}

// NewDocument writes down a plan that New made of the request. What the request does not know is left to the caller.
func NewDocument(r Request, p *Plan, fits Fits) *Document {
	d := &Document{
		Family: r.Profile.Family, ModelType: r.Profile.ModelType, Context: r.Demand.Context, Sequences: r.Demand.Sequences,
		Objective: r.Objective, Manual: r.Ranges != nil, Profile: documentModel(r), Stages: []DocumentPart{},
		Imbalance: p.Imbalance(), Fits: p.Fits, WhatFits: DocumentFits(fits), Warnings: append([]string{}, p.Warnings...),
	}
	if d.Objective == "" {
		d.Objective = ObjectiveMemory
	}
	for _, s := range p.Stages {
		part := DocumentPart{
			Stage: s.StageIndex, Device: s.DeviceID, Memory: s.Memory, Layers: FormatRanges([]sdk.LayerRange{s.LayerRange}),
			Start: s.LayerRange.Start, End: s.LayerRange.End, HasEmbedding: s.HasEmbedding, HasHead: s.HasLMHead,
			Load: s.EstimatedMemoryBytes, Weights: s.Load.Weights, KV: s.Load.KV, State: s.Load.State,
		}
		if s.Limited() {
			part.Budget = &s.BudgetBytes
		}
		d.Stages = append(d.Stages, part)
	}
	return d
}

func documentModel(r Request) DocumentModel {
	p := r.Profile
	m := DocumentModel{
		Layers: []DocumentLayer{}, Embedding: p.Embedding, Head: p.Head, Tied: p.Tied, TiedBytes: p.TiedBytes, Adjacency: []DocumentGroup{},
		ContextLength: p.ContextLength, Quantization: p.Quantization, Exact: p.Exact,
	}
	for _, l := range p.Layers {
		load := r.Demand.LayerLoad(l)
		m.Layers = append(m.Layers, DocumentLayer{l.Kind, load.Weights, load.KV, load.State})
	}
	for _, g := range p.Adjacency {
		m.Adjacency = append(m.Adjacency, DocumentGroup{g.Source, g.Consumer, g.Reason})
	}
	return m
}

// FitsText says what fits, for a reader.
func (d *Document) FitsText() string {
	context, sequences := "any context", "any number of sequences"
	if n := d.WhatFits.Context; n != nil {
		context = fmt.Sprintf("a context of %d tokens", *n)
		if *n > 0 && *n == d.Profile.ContextLength {
			context += " (the model's own limit)"
		}
	}
	if n := d.WhatFits.Sequences; n != nil {
		sequences = fmt.Sprintf("%d %s", *n, plural(*n, "sequence"))
	}
	return fmt.Sprintf("%s for %d %s, or %s of %d tokens", context, d.Sequences, plural(d.Sequences, "sequence"), sequences, d.Context)
}

package api

import (
	"context"
	"time"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/mlxcel/mlxcel/host/tokenize"
	"github.com/mlxcel/mlxcel/sdk"
)

// Model is what requests are answered with, once it is loaded.
type Model struct {
	IDs       []string // the names it is served under; the first is its own, the others are aliases
	Created   time.Time
	VocabSize int // rows of the output projection
	EOS       []int32
	Tokenizer *tokenize.Tokenizer
	Template  *chat.Template // nil when the model has none
	Scheduler Scheduler
	Stages    []Stage

	speller *speller // set by SetModel
}

// Stage is one stage of the pipeline, for /props.
type Stage struct {
	Stage  int    `json:"stage"`
	Layers string `json:"layers"` // inclusive, as --pp-layers takes them
	Plugin string `json:"plugin"`
	Bytes  int64  `json:"bytes"`  // held
	Device string `json:"device"` // "cpu", "metal" or "cuda"; empty when it is not known

	Numerics sdk.Numerics `json:"-"` // what is promised on the device
}

// numerics tells what answers do not depend on, bit for bit, for /props.
type numerics struct {
	SplitInvariant bool `json:"split_invariant"` // over how many stages the model is split
	BatchInvariant bool `json:"batch_invariant"` // what else runs at the same time
	ChunkInvariant bool `json:"chunk_invariant"` // how the prompt is cut into steps
}

// numerics promises what holds on every stage's device.
func (m *Model) numerics() numerics {
	n := numerics{SplitInvariant: true, BatchInvariant: len(m.Stages) > 0, ChunkInvariant: len(m.Stages) > 0}
	for _, s := range m.Stages {
		n.BatchInvariant = n.BatchInvariant && s.Numerics.BatchInvariant
		n.ChunkInvariant = n.ChunkInvariant && s.Numerics.ChunkInvariant
	}
	return n
}

// Scheduler runs requests; Batch makes one of a *batch.Scheduler.
type Scheduler interface {
	// SubmitChoices queues n answers to a request, all or none, with samplers that count the choices up. The end of ctx
	// cancels them.
	SubmitChoices(ctx context.Context, r batch.Request, n int) ([]Stream, error)
	// Limit returns the positions that one sequence can have, prompt and answer together.
	Limit() int
	Status() batch.Status
	// Healthy tells whether work makes progress: nil, or why not.
	Healthy(now time.Time) error
}

// Stream is the answer to one request as it comes; *batch.Stream is one. It is for one goroutine at a time.
type Stream interface {
	// Signal gets a value when there is something to Take.
	Signal() <-chan struct{}
	// Take returns the tokens that came since, and whether the answer has ended.
	Take() (tokens []batch.Token, done bool)
	// PromptScores returns the scores of the prompt's tokens but the first.
	PromptScores() []float32
	// Stop ends the answer after its first n tokens.
	Stop(n int)
	// Result returns what the request came to, and why it failed.
	Result() (*batch.Result, error)
}

// Batch is the scheduler of continuous batching.
type Batch struct{ *batch.Scheduler }

// SubmitChoices is Scheduler's.
func (b Batch) SubmitChoices(ctx context.Context, r batch.Request, n int) ([]Stream, error) {
	queued, err := b.Scheduler.SubmitChoices(ctx, r, n)
	if err != nil {
		return nil, err
	}
	streams := make([]Stream, len(queued))
	for i, s := range queued {
		streams[i] = s
	}
	return streams, nil
}

var _ Stream = (*batch.Stream)(nil)

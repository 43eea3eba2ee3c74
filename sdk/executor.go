// Package sdk owns the executor contract: what a model family's executor process answers to the host.
//
// One executor process holds one stage of one model: a contiguous range of its layers. The host talks to it
// over gRPC on a private Unix socket; bulk tensors lie in a shared-memory Region that both sides map, so
// messages carry offsets only. A family team implements Executor and calls Serve; the host uses Client.
package sdk

import "context"

// ContractVersion is the version of the contract in this package. Host and executor must agree on it, so it changes for
// breaks only; what an executor understands beyond it is said by Description.Capabilities. It is go-plugin's protocol
// version too, so a mismatch is found before any call.
const ContractVersion = 2

// Executor is one stage of one model. Describe, Inspect, Import and Stats may be called at any time and from
// any goroutine; Load and Unload are not called together with anything else. The operations of the step
// stream (Reserve, Release, Step, ExportState, ImportState) come one at a time, in the host's order.
//
// Errors should be *Error, so that the host can tell a bad checkpoint from a lack of memory; any other error
// crosses the boundary as CodeInternal with its text.
type Executor interface {
	// Describe says what this executor is, before any model is named.
	Describe(ctx context.Context) (*Description, error)

	// Inspect returns the profile of a model without loading it: from the safetensors headers, or from
	// config.json alone where no weights are there.
	Inspect(ctx context.Context, req InspectRequest) (*ModelProfile, error)

	// Load reads the tensors of the request's layer range and nothing else. progress may be called from
	// any goroutine until Load returns. A missing tensor, a truncated file, or a shape that disagrees with
	// the config is an error that names the file and the tensor.
	Load(ctx context.Context, req LoadRequest, progress func(LoadProgress)) (*LoadReport, error)

	// Reserve creates the state of a sequence: empty, or with the first Keep positions of another. CodeUnsupported, naming
	// the nearest positions, where the other can't go back to Keep.
	Reserve(ctx context.Context, r Reservation) error

	// Release frees the state of a sequence. Releasing an unknown sequence is not an error: a release must
	// be safe to repeat after a failure.
	Release(ctx context.Context, seq SeqID) error

	// Step runs one micro-batch through the stage's layers. A sequence whose Pos lies before the end of its state loses the
	// positions from Pos on first; CodeUnsupported, naming the nearest positions and before anything is computed, where
	// that can't be. A step that fails halfway leaves its sequences in an unknown state; the host releases them.
	Step(ctx context.Context, s *Step) (*StepResult, error)

	// ExportState writes what the sequence keeps in the layers to w, section by section. The sequence stays as it is.
	ExportState(ctx context.Context, seq SeqID, layers LayerRange, w *StateWriter) error

	// ImportState fills those layers of a reserved sequence from r, which may hold others too. A layer takes a state once,
	// and all that came must have one length. Once every layer of the stage has its state, steps may go on from there.
	ImportState(ctx context.Context, seq SeqID, layers LayerRange, r *StateReader) error

	// Import plans how a foreign container becomes a model folder: names, layouts and config, which only
	// the family knows. The host reads the container and writes the folder.
	Import(ctx context.Context, req ImportRequest) (*ImportPlan, error)

	// Unload frees the model and every sequence. It may be called when nothing is loaded.
	Unload(ctx context.Context) error

	// Stats reports memory and progress. It must answer while a step runs.
	Stats(ctx context.Context) (*Stats, error)
}

// Description is an executor's answer to Describe.
type Description struct {
	Name            string // of the executor binary, e.g. "llama"
	Version         string // of the program
	ContractVersion int
	Runtime         string   // the tensor library and its version, e.g. "mlx 0.32.4"
	Devices         []Device // that it can load on, the one it would choose itself first
	Families        []Family
	Capabilities    []string // of those in capability.go; a host ignores others
}

// Device is what an executor computes on.
type Device struct {
	Index       int    // which LoadRequest.Device names
	Kind        string // "cpu", "metal" or "cuda"
	Name        string
	TotalMemory int64 // bytes a model may use at most, as the operating system or driver reports
	FreeMemory  int64 // bytes free now
	Numerics    Numerics
}

// Numerics is what answers do not depend on, bit for bit, on a device. That they do not depend on how the model is split
// over stages is asked of all.
type Numerics struct {
	BatchInvariant bool // what else is in a step
	ChunkInvariant bool // how a prompt is cut into steps
}

// Family is one wire family that an executor runs.
type Family struct {
	Name          string   // the stable wire name, e.g. "llama"
	ModelTypes    []string // values of config.json's model_type that it accepts
	Pipeline      bool     // layers may be split over stages
	TensorShards  bool     // tensor-parallel ranks are supported
	Adapters      bool     // LoRA adapters are supported
	PlanOnly      bool     // priced for planning, not executable
	Quantizations []string // e.g. "none", "affine-4", "affine-8", "mxfp4"
	Imports       []string // foreign containers, "<format>:<architecture>", e.g. "gguf:llama"
}

// InspectRequest names the model to profile.
type InspectRequest struct {
	Dir   string // the model folder
	Dtype Dtype  // of the activations; DtypeAuto takes the checkpoint's own
}

// ModelProfile is what the planner needs to know of a model. All sizes are in bytes.
type ModelProfile struct {
	Family        string // wire name
	ModelType     string // config.json's model_type
	Layers        []LayerProfile
	Embedding     int64 // token embedding
	Head          int64 // final norm and output projection; a tied projection counts here too
	Tied          bool  // the output projection is the embedding matrix
	TiedBytes     int64 // of Head, that lie within Embedding too: a stage with both holds them once; 0 unless Tied
	Adjacency     []AdjacencyGroup
	Boundary      Boundary
	ContextLength int    // positions, config.json's max_position_embeddings; 0 when unbounded
	VocabSize     int    // rows of the output projection
	HiddenSize    int    // width of the residual stream
	Quantization  string // e.g. "none", "affine 4-bit group 64", "affine 4-bit group 32, 8-bit group 32"
	Exact         bool   // from the weights' headers, not estimated from the config
}

// LayerProfile is one layer's share of a ModelProfile.
type LayerProfile struct {
	Kind    string // e.g. "attention", "sliding-attention", "mamba"
	Weights int64  // bytes held once loaded
	States  []StateProfile
}

// AdjacencyGroup binds two layers to one stage.
type AdjacencyGroup struct {
	Source   int // the layer that owns what is shared
	Consumer int // a later layer that reads it
	Reason   string
}

// Boundary is the tensor that crosses a stage boundary: [rows, Width] in Dtype.
type Boundary struct {
	Width int
	Dtype Dtype
}

// Half-open range [Start, End) of layers.
type LayerRange struct {
	Start, End int
}

// LoadRequest says what an executor is to hold.
type LoadRequest struct {
	Dir          string
	Family       string // wire name, one of Description.Families
	Layers       LayerRange
	HasEmbedding bool // this stage turns token ids into hidden rows
	HasHead      bool // this stage turns hidden rows into logits and samples
	Dtype        Dtype
	Device       int    // Device.Index of one of Description.Devices
	Threads      int    // compute threads; 0 lets the executor choose
	KVBudget     int64  // bytes that all sequences' state may use together; 0 means no limit
	TPRank       int    // tensor-parallel rank, 0 in a group of one
	TPSize       int    // ranks in the group; 0 and 1 mean none
	Adapter      string // LoRA adapter folder; empty means none
	Region       RegionLayout
}

// LoadProgress tells how far a load has come.
type LoadProgress struct {
	Loaded, Total int64 // bytes
	Tensor        string
}

// LoadReport is what a load ended with.
type LoadReport struct {
	WeightBytes int64 // held for this stage, embedding and head included
	Tensors     int
	Boundary    Boundary // what this stage takes in and gives out
	VocabSize   int
}

// SeqID names a sequence on every stage of one pipeline. The coordinator never reuses one within a run.
type SeqID uint64

// Reservation creates a sequence. A place that does not answer needs neither Prompt, Generated nor Sampler.
type Reservation struct {
	Seq     SeqID
	Prompt  []int32 // the prompt's token ids: the penalties count them
	MaxLen  int     // prompt and generated positions at most; 0 when not known
	Sampler Sampler
	Adapter string // adapter id; empty means none

	// With Keep > 0 the sequence begins with the first Keep positions of From, shared where the cache can. Prompt, sampler
	// and promise are its own.
	From SeqID
	Keep int
	// Generated are token ids that follow the prompt and whose positions lie within Keep, or come by ImportState: the
	// penalties count them.
	Generated []int32
	// Snapshots is how many snapshots of a recurrent state the sequence holds at most; a further one takes the oldest's
	// place, and where it is 0 none is kept. They count in the sequence's promise.
	Snapshots int
}

// CountsTokens tells whether the sampler looks at the tokens seen: then the place that answers needs their ids.
func (s *Sampler) CountsTokens() bool {
	return s.RepetitionPenalty != 0 && s.RepetitionPenalty != 1 || s.PresencePenalty != 0 || s.FrequencyPenalty != 0
}

// Sampler is how tokens of one sequence are chosen. The zero value is greedy.
type Sampler struct {
	Temperature       float32 // 0 is greedy
	TopP              float32 // keep the smallest set of tokens whose probability reaches TopP; 0 and 1 keep all
	TopK              int     // keep the K most probable tokens; 0 keeps all
	MinP              float32 // drop tokens less probable than MinP times the most probable one; 0 keeps all
	RepetitionPenalty float32 // divides positive and multiplies negative logits of tokens seen; 0 and 1 do nothing
	PresencePenalty   float32 // subtracted once from the logit of each token generated before
	FrequencyPenalty  float32 // subtracted for each time a token was generated before
	Seed              uint64  // with Choice and the position it alone decides the random draw
	Choice            uint32  // which of a request's n answers this is
	LogitBias         map[int32]float32
}

// Want is what a step is to return for a sequence, beyond its hidden rows.
type Want int

const (
	WantNothing Want = iota // hidden rows only, for the next stage; on the head stage nothing (prefill)
	WantToken               // sample one token from the last row's logits
	WantScores              // the log-probability of Targets[i] after row i
	WantLogits              // the last row's logits, float32 [VocabSize], in the slot's output
)

// Step is one micro-batch on its way through one stage.
type Step struct {
	ID     uint64 // unique on the stream; the reply carries it
	Slot   int    // of the region; it belongs to the step until its reply
	Seqs   []SeqStep
	Hidden Tensor // [rows of all sequences in order, Boundary.Width], in the slot's input; absent on the stage with the embedding

	// Out is the slot's output area, set for the executor by the transport.
	Out []byte
}

// SeqStep is one sequence's rows in a Step.
type SeqStep struct {
	Seq      SeqID
	Pos      int     // absolute position of the first row; positions of the state from there on are dropped first
	Rows     int     // at least 1
	Tokens   []int32 // the rows' token ids: with the embedding, and where the sampler counts tokens at the place that answers; else none
	Prompt   bool    // the rows are prompt, not generated
	Snapshot bool    // keep a snapshot of recurrent states at the rows' end, so that Keep and Pos may go back to it later
	Want     Want
	TopN     int     // with WantToken: the number of most probable tokens to report
	Logprob  bool    // with WantToken: the answer has the token's log-probability; TopN > 0 implies it
	Targets  []int32 // with WantScores: one a row
	Allowed  []byte  // with WantToken: bit i of byte i/8 allows token i; empty allows all. An executor sees the slot's memory
}

// End is the position after the last row.
func (s *SeqStep) End() int { return s.Pos + s.Rows }

// Rows returns the number of rows of the step.
func (s *Step) Rows() int {
	n := 0
	for i := range s.Seqs {
		n += s.Seqs[i].Rows
	}
	return n
}

// StepResult is a stage's answer to a Step.
type StepResult struct {
	ID           uint64
	Hidden       Tensor // in the slot's output; absent on the stage with the head
	Seqs         []SeqResult
	ComputeNanos int64 // time the executor spent on the step
	QueueNanos   int64 // time from the host's sending to the executor's beginning; set by the transport
}

// SeqResult is one sequence's answer from the stage with the head.
type SeqResult struct {
	Seq     SeqID
	Token   int32   // with WantToken, else -1
	Logprob float32 // natural log-probability of Token under the raw logits (temperature 1, no penalties); 0 where not asked for
	Top     []TokenScore
	Scores  []float32 // with WantScores
	Logits  Tensor    // with WantLogits
}

// TokenScore is a candidate token. Logit is the raw output of the head, before penalties and temperature.
type TokenScore struct {
	Token   int32
	Logit   float32
	Logprob float32
}

// Tensor is a dense row-major matrix. Data aliases the shared region: it is valid until the slot is given back.
type Tensor struct {
	Dtype Dtype
	Rows  int
	Width int
	Data  []byte
}

// Stats is a snapshot of an executor. Steps grows with every step finished, so a stage that stands still
// with work queued can be told from one that is busy.
type Stats struct {
	Loaded        bool
	Steps         uint64 // finished since the start of the process
	Sequences     int
	WeightBytes   int64
	StateBytes    int64 // held by all sequences; what several share counts once
	ScratchBytes  int64 // held beside weights and state: activations and what the allocator keeps for the next step
	PeakBytes     int64 // the most that weights, state and scratch have taken together since the load
	ResidentBytes int64 // of the process
	BusyNanos     int64 // spent in steps since the start
}

// ImportRequest describes a foreign container whose bytes the host holds.
type ImportRequest struct {
	Format       string         // "gguf"
	Architecture string         // e.g. "llama"
	Metadata     map[string]any // string, int64, uint64, float64, bool, or a slice of one of them; long arrays are left out
	Tensors      []ImportTensor
}

// ImportTensor is one tensor of a foreign container.
type ImportTensor struct {
	Name  string
	Type  string  // the container's own type name, e.g. "Q4_1"
	Shape []int64 // row-major, outermost first: [rows, cols] for a matrix
}

// ImportPlan turns the container's tensors into a model folder.
type ImportPlan struct {
	Family  string
	Config  []byte // config.json without quantization keys, which the host adds from the tensors' types
	Tensors []ImportTarget
	Skipped []string // container tensors that the model does not need, with the reason: "name: reason"
}

// ImportTarget names one tensor of the folder. Rows are moved whole, so quantized data moves without loss:
// the source's rows are viewed as RowShape and transposed by RowPerm (numpy's meaning); empty keeps their order.
type ImportTarget struct {
	Source   string
	Target   string // without ".weight": the module's path, as config.json's quantization overrides name it
	Suffix   string // ".weight" or ".bias"
	RowShape []int
	RowPerm  []int
}

package sdktest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

// saboteur is the example's executor with one fault. A nil hook leaves a method alone.
type saboteur struct {
	sdk.Executor
	describe func(*sdk.Description)
	inspect  func(*sdk.ModelProfile, error) (*sdk.ModelProfile, error)
	load     func(req *sdk.LoadRequest, progress *func(sdk.LoadProgress))
	loaded   func(*sdk.LoadReport, error) (*sdk.LoadReport, error)
	reserve  func(*sdk.Reservation)
	release  func(sdk.SeqID) (skip bool)
	export   func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error
	bring    func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error
	reserved func(r sdk.Reservation, err error) error
	before   func(ctx context.Context, s *sdk.Step) error
	after    func(s *sdk.Step, r *sdk.StepResult, err error) (*sdk.StepResult, error)
	unload   func() (skip bool)
	stats    func(*sdk.Stats)

	mu      sync.Mutex        // held over the hooks of operations and of Stats, which come on goroutines of their own
	lengths map[sdk.SeqID]int // of the sequences, as the executor has them
}

func (b *saboteur) Describe(ctx context.Context) (*sdk.Description, error) {
	d, err := b.Executor.Describe(ctx)
	if b.describe != nil {
		b.describe(d)
	}
	return d, err
}

func (b *saboteur) Inspect(ctx context.Context, req sdk.InspectRequest) (*sdk.ModelProfile, error) {
	p, err := b.Executor.Inspect(ctx, req)
	if b.inspect != nil {
		return b.inspect(p, err)
	}
	return p, err
}

func (b *saboteur) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	if b.load != nil {
		b.load(&req, &progress)
	}
	r, err := b.Executor.Load(ctx, req, progress)
	if b.loaded != nil {
		return b.loaded(r, err)
	}
	return r, err
}

func (b *saboteur) Reserve(ctx context.Context, r sdk.Reservation) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reserve != nil {
		b.reserve(&r)
	}
	err := b.Executor.Reserve(ctx, r)
	if err == nil {
		b.lengths[r.Seq] = r.Keep
	}
	if b.reserved != nil {
		return b.reserved(r, err)
	}
	return err
}

func (b *saboteur) Release(ctx context.Context, seq sdk.SeqID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.release != nil && b.release(seq) {
		return nil
	}
	return b.Executor.Release(ctx, seq)
}

func (b *saboteur) ExportState(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.export != nil {
		return b.export(ctx, seq, layers, w)
	}
	return b.Executor.ExportState(ctx, seq, layers, w)
}

func (b *saboteur) ImportState(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bring != nil {
		return b.bring(ctx, seq, layers, r)
	}
	return b.Executor.ImportState(ctx, seq, layers, r)
}

func (b *saboteur) Step(ctx context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.before != nil {
		if err := b.before(ctx, s); err != nil {
			return nil, err
		}
	}
	r, err := b.Executor.Step(ctx, s)
	for i := 0; err == nil && i < len(s.Seqs); i++ {
		b.lengths[s.Seqs[i].Seq] = s.Seqs[i].End()
	}
	if b.after != nil {
		return b.after(s, r, err)
	}
	return r, err
}

func (b *saboteur) Unload(ctx context.Context) error {
	if b.unload != nil && b.unload() {
		return nil
	}
	return b.Executor.Unload(ctx)
}

func (b *saboteur) Stats(ctx context.Context) (*sdk.Stats, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, err := b.Executor.Stats(ctx)
	if b.stats != nil {
		b.stats(s)
	}
	return s, err
}

// answers makes an after hook of a change to every answer of a successful step.
func answers(change func(s *sdk.Step, i int, r *sdk.SeqResult)) func(*sdk.Step, *sdk.StepResult, error) (*sdk.StepResult, error) {
	return func(s *sdk.Step, r *sdk.StepResult, err error) (*sdk.StepResult, error) {
		if err == nil {
			for i := range r.Seqs {
				change(s, i, &r.Seqs[i])
			}
		}
		return r, err
	}
}

// profiled returns an inspect hook that changes every state of the profile.
func profiled(change func(*sdk.StateProfile)) func(*sdk.ModelProfile, error) (*sdk.ModelProfile, error) {
	return func(p *sdk.ModelProfile, err error) (*sdk.ModelProfile, error) {
		if err == nil {
			for i := range p.Layers {
				for j := range p.Layers[i].States {
					change(&p.Layers[i].States[j])
				}
			}
		}
		return p, err
	}
}

// nudge changes a number by its last bit.
func nudge(raw []byte) {
	bits := binary.LittleEndian.Uint32(raw)
	binary.LittleEndian.PutUint32(raw, bits^1)
}

// sabotage lists the faults, by the check that must find them.
var sabotage = []struct {
	check string
	fault string
	build func(b *saboteur)
}{
	{"describe", "another contract version", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.ContractVersion++ }
	}},
	{"describe", "an unknown device", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Devices[0].Kind = "abacus" }
	}},
	{"describe", "no memory", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Devices[0].TotalMemory, d.Devices[0].FreeMemory = 0, 0 }
	}},
	{"describe", "two devices with one index", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Devices = append(d.Devices, d.Devices[0]) }
	}},
	{"describe", "no model_type", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Families[0].ModelTypes = nil }
	}},
	{"describe", "a family twice", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Families = append(d.Families, d.Families[0]) }
	}},
	{"inspect", "the weights' headers are not read", func(b *saboteur) {
		b.inspect = func(p *sdk.ModelProfile, err error) (*sdk.ModelProfile, error) {
			p.Exact = false
			return p, err
		}
	}},
	{"inspect", "an estimate that claims to be exact", func(b *saboteur) {
		b.inspect = func(p *sdk.ModelProfile, err error) (*sdk.ModelProfile, error) {
			p.Exact = true
			return p, err
		}
	}},
	{"weights", "the profile forgets the biases", func(b *saboteur) {
		b.inspect = func(p *sdk.ModelProfile, err error) (*sdk.ModelProfile, error) {
			for i := range p.Layers {
				p.Layers[i].Weights -= 4 * int64(p.HiddenSize)
			}
			return p, err
		}
	}},
	{"weights", "every stage loads the embedding", func(b *saboteur) {
		b.load = func(req *sdk.LoadRequest, _ *func(sdk.LoadProgress)) { req.HasEmbedding = true }
	}},
	{"progress", "no progress", func(b *saboteur) {
		b.load = func(_ *sdk.LoadRequest, progress *func(sdk.LoadProgress)) { *progress = func(sdk.LoadProgress) {} }
	}},
	{"progress", "progress that never ends", func(b *saboteur) {
		b.load = func(_ *sdk.LoadRequest, progress *func(sdk.LoadProgress)) {
			report := *progress
			*progress = func(p sdk.LoadProgress) { p.Loaded = 0; report(p) }
		}
	}},
	{"load errors", "untyped errors", func(b *saboteur) {
		b.loaded = func(r *sdk.LoadReport, err error) (*sdk.LoadReport, error) {
			if err != nil {
				err = errors.New("something went wrong")
			}
			return r, err
		}
	}},
	{"load errors", "the device is not looked at", func(b *saboteur) {
		b.load = func(req *sdk.LoadRequest, _ *func(sdk.LoadProgress)) { req.Device = 0 }
	}},
	{"load errors", "too many layers are cut down in silence", func(b *saboteur) {
		b.load = func(req *sdk.LoadRequest, _ *func(sdk.LoadProgress)) { req.Layers.End = min(req.Layers.End, layers) }
	}},
	{"damaged weights", "damage is healed in silence", func(b *saboteur) {
		b.load = func(req *sdk.LoadRequest, _ *func(sdk.LoadProgress)) {
			if strings.Contains(req.Dir, "sdktest-") {
				healed, err := os.MkdirTemp(req.Dir, "healed-")
				if err != nil {
					panic(err)
				}
				if err := leakyrnn.WriteRandom(healed, tiny, 2); err != nil {
					panic(err)
				}
				req.Dir = healed
			}
		}
	}},
	{"damaged weights", "errors don't name the tensor", func(b *saboteur) {
		b.loaded = func(r *sdk.LoadReport, err error) (*sdk.LoadReport, error) {
			if e, ok := errors.AsType[*sdk.Error](err); ok {
				e.Tensor = ""
			}
			return r, err
		}
	}},
	{"order", "the answer depends on the step's number", func(b *saboteur) {
		b.after = answers(func(s *sdk.Step, _ int, r *sdk.SeqResult) {
			if s.ID >= 1000 && r.Token >= 0 {
				r.Token = (r.Token + 1) % vocab
			}
		})
	}},
	{"greedy", "the second best token", func(b *saboteur) {
		b.after = answers(func(_ *sdk.Step, _ int, r *sdk.SeqResult) {
			if len(r.Top) > 1 {
				r.Token = r.Top[1].Token
			}
		})
	}},
	{"greedy", "log-probabilities to the base 2", func(b *saboteur) {
		b.after = answers(func(_ *sdk.Step, _ int, r *sdk.SeqResult) { r.Logprob /= math.Ln2 })
	}},
	{"greedy", "the top tokens in the wrong order", func(b *saboteur) {
		b.after = answers(func(_ *sdk.Step, _ int, r *sdk.SeqResult) {
			if len(r.Top) > 1 {
				r.Top[0], r.Top[1] = r.Top[1], r.Top[0]
			}
		})
	}},
	{"log-probability", "it comes unasked", func(b *saboteur) {
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if q := &s.Seqs[i]; !q.Logprob && q.TopN == 0 {
				r.Logprob = -1
			}
		})
	}},
	{"log-probability", "it comes with top tokens only", func(b *saboteur) {
		b.before = func(_ context.Context, s *sdk.Step) error { s.Seqs[0].Logprob = false; return nil }
	}},
	{"log-probability", "top tokens come without it", func(b *saboteur) {
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if !s.Seqs[i].Logprob {
				r.Logprob = 0
			}
		})
	}},
	{"log-probability", "another token where nobody asks for it", func(b *saboteur) {
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if q := &s.Seqs[i]; !q.Logprob && q.TopN == 0 {
				r.Token = (r.Token + 1) % vocab
			}
		})
	}},
	{"scores", "the scores come one row late", func(b *saboteur) {
		b.after = answers(func(_ *sdk.Step, _ int, r *sdk.SeqResult) {
			if n := len(r.Scores); n > 1 {
				copy(r.Scores[1:], r.Scores[:n-1])
			}
		})
	}},
	{"split", "a bit is lost at the boundary", func(b *saboteur) {
		b.after = func(_ *sdk.Step, r *sdk.StepResult, err error) (*sdk.StepResult, error) {
			if err == nil && r.Hidden.Rows > 0 {
				for i := 0; i < len(r.Hidden.Data); i += 4 {
					nudge(r.Hidden.Data[i:])
				}
			}
			return r, err
		}
	}},
	{"chunks", "a long chunk takes another path", func(b *saboteur) {
		b.after = answers(func(s *sdk.Step, _ int, r *sdk.SeqResult) {
			if s.Rows() > 3 {
				r.Logprob += 1e-7
			}
		})
	}},
	{"batch", "a batch takes another path", func(b *saboteur) {
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if i > 0 {
				r.Logprob += 1e-7
			}
		})
	}},
	{"slots", "a byte before the output is overwritten", func(b *saboteur) {
		b.before = func(_ context.Context, s *sdk.Step) error {
			*(*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(s.Out)), -1)) = 0
			return nil
		}
	}},
	{"release", "a release leaves the sequence", func(b *saboteur) {
		b.release = func(sdk.SeqID) bool { return true }
	}},
	{"share", "the prompt is the other's", func(b *saboteur) {
		prompts := map[sdk.SeqID][]int32{}
		b.reserve = func(r *sdk.Reservation) {
			if r.Keep > 0 {
				r.Prompt = prompts[r.From]
			}
			prompts[r.Seq] = r.Prompt
		}
	}},
	{"share", "a position behind the edge of the profile's block is lost", func(b *saboteur) {
		const block = 80
		b.inspect = profiled(func(s *sdk.StateProfile) { s.Block = block })
		b.reserve = func(r *sdk.Reservation) {
			if r.Keep == block+1 {
				r.Keep = block
			}
		}
	}},
	{"share counts", "who shares is no sequence", func(b *saboteur) {
		b.stats = func(s *sdk.Stats) { s.Sequences = min(s.Sequences, 1) }
	}},
	{"snapshots", "one is held where none was reserved", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Snapshots = max(1, r.Snapshots) }
	}},
	{"snapshots", "one more is held than was reserved", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Snapshots++ }
	}},
	{"price", "what a sequence dropped counts still", func(b *saboteur) {
		most := int64(0)
		b.stats = func(s *sdk.Stats) { most = max(most, s.StateBytes); s.StateBytes = most }
	}},
	{"unknown sequence", "a step makes the sequence it lacks", func(b *saboteur) {
		b.before = func(ctx context.Context, s *sdk.Step) error {
			_ = b.Executor.Reserve(ctx, sdk.Reservation{Seq: s.Seqs[0].Seq})
			return nil
		}
	}},
	{"unknown sequence", "the wrong code", func(b *saboteur) {
		b.after = recode(sdk.CodeUnknownSequence, sdk.CodeInternal)
	}},
	{"positions", "positions are not looked at", func(b *saboteur) {
		lengths := map[sdk.SeqID]int{}
		b.before = func(_ context.Context, s *sdk.Step) error {
			for i := range s.Seqs {
				q := &s.Seqs[i]
				q.Pos = lengths[q.Seq]
				lengths[q.Seq] += q.Rows
			}
			return nil
		}
	}},
	{"positions", "the wrong code", func(b *saboteur) {
		b.after = recode(sdk.CodeInvalid, sdk.CodeInternal)
	}},
	{"cancel", "a canceled step fails with the wrong code", func(b *saboteur) {
		b.before = func(ctx context.Context, s *sdk.Step) error {
			if s.Rows() != maxRows {
				return nil
			}
			<-ctx.Done()
			return errors.New("interrupted")
		}
	}},
	{"cancel", "after a cancel the executor is not itself", func(b *saboteur) {
		canceled := false
		b.reserve = func(r *sdk.Reservation) { canceled = canceled || len(r.Prompt) == maxRows }
		b.after = answers(func(_ *sdk.Step, _ int, r *sdk.SeqResult) {
			if canceled {
				r.Logprob--
			}
		})
	}},
	{"stats", "steps are not counted", func(b *saboteur) {
		b.stats = func(s *sdk.Stats) { s.Steps = 0 }
	}},
	{"stats", "state is not counted", func(b *saboteur) {
		b.stats = func(s *sdk.Stats) { s.StateBytes = 0 }
	}},
	{"stats", "released state is counted still", func(b *saboteur) {
		most := int64(0)
		b.stats = func(s *sdk.Stats) { most = max(most, s.StateBytes); s.StateBytes = most }
	}},
	{"price", "a position costs more than the profile says", func(b *saboteur) {
		b.inspect = profiled(func(s *sdk.StateProfile) { s.BytesPerPosition-- })
	}},
	{"price", "the profile has another block", func(b *saboteur) {
		b.inspect = profiled(func(s *sdk.StateProfile) { s.Block = 4 })
	}},
	{"price", "the profile has a window that never fills", func(b *saboteur) {
		b.inspect = profiled(func(s *sdk.StateProfile) { s.Window = 8 })
	}},
	{"price", "the profile has a fixed state that is not there", func(b *saboteur) {
		b.inspect = profiled(func(s *sdk.StateProfile) { s.Fixed = 1 })
	}},
	{"price", "state is not counted beyond some length", func(b *saboteur) {
		b.stats = func(s *sdk.Stats) { s.StateBytes = min(s.StateBytes, 64) }
	}},
	{"share", "it begins one position too early", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Keep = max(0, r.Keep-1) }
		b.before = func(_ context.Context, s *sdk.Step) error { s.Seqs[0].Pos = max(0, s.Seqs[0].Pos-1); return nil }
	}},
	{"share", "the sampler is the other's", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) {
			if r.Keep > 0 {
				r.Sampler = sdk.Sampler{}
			}
		}
	}},
	{"share", "the release of one is that of all", func(b *saboteur) {
		kept := map[sdk.SeqID]sdk.SeqID{}
		b.reserve = func(r *sdk.Reservation) {
			if r.Keep > 0 {
				kept[r.From] = r.Seq
			}
		}
		b.release = func(seq sdk.SeqID) bool {
			if to, shared := kept[seq]; shared {
				_ = b.Executor.Release(context.Background(), to)
			}
			return false
		}
	}},
	{"share errors", "too many positions are cut down in silence", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Keep = min(r.Keep, 40) }
	}},
	{"share errors", "another code", func(b *saboteur) {
		b.reserved = func(_ sdk.Reservation, err error) error {
			return recoded(err, sdk.CodeUnknownSequence, sdk.CodeInternal)
		}
	}},
	{"share errors", "the nearest positions are not named", func(b *saboteur) {
		b.reserved = func(_ sdk.Reservation, err error) error { return unnamed(err) }
	}},
	{"share counts", "what is shared counts twice", func(b *saboteur) {
		extra := map[sdk.SeqID]bool{}
		b.reserve = func(r *sdk.Reservation) { extra[r.Seq] = r.Keep > 0 }
		b.release = func(seq sdk.SeqID) bool { delete(extra, seq); return false }
		b.stats = func(s *sdk.Stats) {
			for _, shared := range extra {
				if shared {
					s.StateBytes *= 2
				}
			}
		}
	}},
	{"share counts", "the last owner frees nothing", func(b *saboteur) {
		left := int64(0)
		shared := false
		b.reserve = func(r *sdk.Reservation) { shared = shared || r.Keep > 0 }
		b.stats = func(s *sdk.Stats) {
			if s.Sequences == 0 && shared {
				left = 64
			}
			s.StateBytes += left
		}
	}},
	{"rewind", "what lies past the position stays", func(b *saboteur) {
		ends := map[sdk.SeqID]int{}
		b.before = func(_ context.Context, s *sdk.Step) error {
			for i := range s.Seqs {
				q := &s.Seqs[i]
				q.Pos = max(q.Pos, ends[q.Seq])
				ends[q.Seq] = q.End()
			}
			return nil
		}
	}},
	{"rewind", "it goes back too far", func(b *saboteur) {
		ends := map[sdk.SeqID]int{}
		b.before = func(_ context.Context, s *sdk.Step) error {
			q := &s.Seqs[0]
			back := q.Pos < ends[q.Seq]
			ends[q.Seq] = q.End()
			if back {
				q.Pos = 0
			}
			return nil
		}
	}},
	{"rewind penalties", "the penalties remember what was dropped", func(b *saboteur) {
		ends := map[sdk.SeqID]int{}
		again := false
		b.before = func(_ context.Context, s *sdk.Step) error {
			q := &s.Seqs[0]
			again = again || q.Pos < ends[q.Seq]
			ends[q.Seq] = q.End()
			return nil
		}
		b.after = answers(func(_ *sdk.Step, _ int, r *sdk.SeqResult) {
			if again && len(r.Top) > 1 {
				r.Token = r.Top[1].Token
			}
		})
	}},
	{"rewind refused", "the nearest positions are not named", func(b *saboteur) {
		b.after = func(_ *sdk.Step, r *sdk.StepResult, err error) (*sdk.StepResult, error) { return r, unnamed(err) }
	}},
	{"rewind refused", "the other sequence of the step is computed", func(b *saboteur) {
		b.before = func(ctx context.Context, s *sdk.Step) error {
			if len(s.Seqs) > 1 {
				first := *s
				first.Seqs = s.Seqs[:1]
				_, _ = b.Executor.Step(ctx, &first)
			}
			return nil
		}
	}},
	{"snapshots", "they are without number", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Snapshots *= 10 }
	}},
	{"snapshots", "they change the answer", func(b *saboteur) {
		many := map[sdk.SeqID]int{}
		b.reserve = func(r *sdk.Reservation) { many[r.Seq] = r.Snapshots }
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if s.Seqs[i].Snapshot && many[s.Seqs[i].Seq] > 0 {
				r.Logprob += 1e-7
			}
		})
	}},
	{"snapshots", "they are left over", func(b *saboteur) {
		left := int64(0)
		b.before = func(_ context.Context, s *sdk.Step) error {
			if s.Seqs[0].Snapshot {
				left++
			}
			return nil
		}
		b.stats = func(s *sdk.Stats) {
			if s.Sequences == 0 {
				s.StateBytes += left
			}
		}
	}},
	{"generated", "it is not counted", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Generated = nil }
	}},
	{"state", "the state of another sequence", func(b *saboteur) {
		b.export = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
			return spoil(b, ctx, seq, layers, w, func(h *sdk.StateHeader, list []section) []section {
				for _, s := range list {
					for i := range s.rows {
						s.rows[i] = 0
					}
				}
				return list
			})
		}
	}},
	{"state", "an export changes the sequence", func(b *saboteur) {
		b.export = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
			err := b.Executor.ExportState(ctx, seq, layers, w)
			return errors.Join(err, b.Executor.Release(ctx, seq))
		}
	}},
	{"state", "the positions are wrong", func(b *saboteur) {
		b.export = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
			return spoil(b, ctx, seq, layers, w, func(h *sdk.StateHeader, list []section) []section { h.Positions++; return list })
		}
	}},
	{"state layers", "one layer is as good as all", func(b *saboteur) {
		b.after = func(s *sdk.Step, r *sdk.StepResult, err error) (*sdk.StepResult, error) {
			if e, ok := errors.AsType[*sdk.Error](err); ok && e.Code == sdk.CodeInvalid {
				return &sdk.StepResult{ID: s.ID, Seqs: []sdk.SeqResult{{Seq: s.Seqs[0].Seq, Token: 1}}}, nil
			}
			return r, err
		}
	}},
	{"state layers", "a layer may come twice", func(b *saboteur) {
		b.bring = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
			if err := b.Executor.ImportState(ctx, seq, layers, r); sdk.CodeOf(err) != sdk.CodeInvalid {
				return err
			}
			return nil
		}
	}},
	{"state errors", "what is wrong is taken", func(b *saboteur) {
		b.bring = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
			_ = b.Executor.ImportState(ctx, seq, layers, r)
			return nil
		}
	}},
	{"state errors", "a refused import leaves something", func(b *saboteur) {
		left := int64(0)
		b.bring = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
			err := b.Executor.ImportState(ctx, seq, layers, r)
			if err != nil {
				left += 8
			}
			return err
		}
		b.stats = func(s *sdk.Stats) { s.StateBytes += left }
	}},
	{"needs", "a later stage wants token ids", func(b *saboteur) {
		embeds := false
		b.load = func(req *sdk.LoadRequest, _ *func(sdk.LoadProgress)) { embeds = req.HasEmbedding }
		b.before = func(_ context.Context, s *sdk.Step) error {
			if !embeds && len(s.Seqs[0].Tokens) == 0 {
				return sdk.Errorf(sdk.CodeInvalid, "no token ids")
			}
			return nil
		}
	}},
	{"needs", "each mask goes to the next sequence", func(b *saboteur) {
		b.before = func(_ context.Context, s *sdk.Step) error {
			if n := len(s.Seqs); n > 1 {
				first := s.Seqs[0].Allowed
				for i := range n - 1 {
					s.Seqs[i].Allowed = s.Seqs[i+1].Allowed
				}
				s.Seqs[n-1].Allowed = first
			}
			return nil
		}
	}},
	{"capabilities", "one is listed twice", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Capabilities = append(d.Capabilities, d.Capabilities[0]) }
	}},
	{"capabilities", "it goes back though it says that it can't", func(b *saboteur) {
		b.describe = func(d *sdk.Description) {
			d.Capabilities = slices.DeleteFunc(d.Capabilities, func(c string) bool { return c == sdk.CapabilityRewind })
		}
	}},
	{"reload", "the unload keeps the sequences", func(b *saboteur) {
		b.unload = func() bool { return true }
	}},
	{"seeds", "the seed is not looked at", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Sampler.Seed = 7 }
	}},
	{"seeds", "the choice is not looked at", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Sampler.Choice = 0 }
	}},
	{"seeds", "the draw depends on the sequence's number", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Sampler.Seed += uint64(r.Seq) }
	}},
	{"seeds", "top-k is not looked at", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Sampler.TopK = 0 }
	}},
	{"mask", "the mask is not looked at", func(b *saboteur) {
		b.before = func(_ context.Context, s *sdk.Step) error { s.Seqs[0].Allowed = nil; return nil }
	}},
	{"mask", "the bias is not looked at", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Sampler.LogitBias = nil }
	}},
	{"penalties", "the repetition penalty forgets the prompt", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Prompt = nil }
	}},
	{"penalties", "presence and frequency are mixed up", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) {
			s := &r.Sampler
			s.PresencePenalty, s.FrequencyPenalty = s.FrequencyPenalty, s.PresencePenalty
		}
	}},
	{"budget", "the budget is not looked at", func(b *saboteur) {
		b.load = func(req *sdk.LoadRequest, _ *func(sdk.LoadProgress)) { req.KVBudget = 0 }
	}},
	{"memory", "every step leaks", func(b *saboteur) {
		var leak [][]byte
		b.before = func(context.Context, *sdk.Step) error {
			lost := make([]byte, 64<<10)
			fill(lost, 1)
			leak = append(leak, lost)
			return nil
		}
	}},
	{"memory", "sequences are left over", func(b *saboteur) {
		b.release = func(sdk.SeqID) bool { return true }
	}},
}

// recoded gives an error another code.
func recoded(err error, from, to sdk.Code) error {
	if e, ok := errors.AsType[*sdk.Error](err); ok && e.Code == from {
		e.Code = to
	}
	return err
}

// unnamed takes the numbers out of a refusal.
func unnamed(err error) error {
	if sdk.CodeOf(err) != sdk.CodeUnsupported {
		return err
	}
	return sdk.Errorf(sdk.CodeUnsupported, "%s", number.ReplaceAllString(err.Error(), "some"))
}

// spoil exports a state and hands on what change makes of it.
func spoil(b *saboteur, ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter, change func(*sdk.StateHeader, []section) []section) error {
	var out bytes.Buffer
	right := sdk.NewStateWriter(&out, leakyrnn.Family, layers)
	if err := b.Executor.ExportState(ctx, seq, layers, right); err != nil {
		return err
	}
	if _, err := right.Close(); err != nil {
		return err
	}
	header, list, err := parse(out.Bytes())
	if err != nil {
		return err
	}
	list = change(&header, list)
	if err := w.Begin(header.Positions); err != nil {
		return err
	}
	for _, s := range list {
		to, err := w.Section(s.StateSection)
		if err == nil {
			_, err = to.Write(s.rows)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func recode(from, to sdk.Code) func(*sdk.Step, *sdk.StepResult, error) (*sdk.StepResult, error) {
	return func(_ *sdk.Step, r *sdk.StepResult, err error) (*sdk.StepResult, error) {
		return r, recoded(err, from, to)
	}
}

const (
	layers = 3
	vocab  = 37
)

var tiny = leakyrnn.Config{HiddenSize: 12, Layers: layers, VocabSize: vocab, ContextLength: 200}

func tinyConfig(t *testing.T) Config {
	cfg := Config{ModelDir: t.TempDir(), Family: leakyrnn.Family, MemorySteps: 600, Timeout: time.Minute}
	if err := leakyrnn.WriteRandom(cfg.ModelDir, tiny, 1); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// TestSabotage breaks the executor in one way after the other; the check named must find each.
func TestSabotage(t *testing.T) {
	cfg := tinyConfig(t)
	proven := map[string]bool{}
	for _, fault := range sabotage {
		t.Run(fault.check+": "+fault.fault, func(t *testing.T) {
			err := broken(t, cfg, fault.check, fault.build)
			if err == nil || errors.Is(err, errSkipped) {
				t.Errorf("the check did not find the fault: %v", err)
			}
			t.Log(err)
		})
		proven[fault.check] = true
	}
	for _, fault := range sabotageOfStates {
		proven[fault.check] = true
	}
	for _, c := range checks() {
		if !proven[c.name] {
			t.Errorf("no fault proves that the check %q can fail", c.name)
		}
	}
}

func byName(t *testing.T, name string) check {
	for _, c := range checks() {
		if c.name == name {
			return c
		}
	}
	t.Fatalf("no check has the name %q", name)
	return check{}
}

func TestConfig(t *testing.T) {
	full := Config{New: leakyrnn.New, ModelDir: "model", Family: "family"}
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"nothing to run":     {func(c *Config) { c.New = nil }, "exactly one"},
		"two ways to run":    {func(c *Config) { c.Launch = Self(nil) }, "exactly one"},
		"no model":           {func(c *Config) { c.ModelDir = "" }, "ModelDir"},
		"no family":          {func(c *Config) { c.Family = "" }, "Family"},
		"a prompt too short": {func(c *Config) { c.Prompt = []int32{1} }, "at least 8"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := full
			c.change(&cfg)
			if err := cfg.complete(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one about %q", err, c.want)
			}
		})
	}
}

package stagelink

import (
	"context"
	"net"
	"reflect"
	"testing"

	"github.com/mlxcel/mlxcel/host/internal/filltest"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// recorder is an executor that keeps what it is told and answers steps with filled results.
type recorder struct {
	sdk.Executor
	got     chan any
	results []sdk.SeqResult
}

func (r *recorder) Describe(context.Context) (*sdk.Description, error) {
	return &sdk.Description{Name: "recorder", ContractVersion: sdk.ContractVersion, Devices: []sdk.Device{{Kind: "cpu"}}, Capabilities: []string{
		sdk.CapabilityShare, sdk.CapabilityRewind, sdk.CapabilitySnapshots, sdk.CapabilityState, sdk.CapabilityMasks,
		sdk.CapabilityScores, sdk.CapabilityLogits,
	}}, nil
}

func (r *recorder) Load(context.Context, sdk.LoadRequest, func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	return &sdk.LoadReport{Boundary: sdk.Boundary{Width: 4, Dtype: sdk.DtypeFloat32}, VocabSize: 100}, nil
}

func (r *recorder) Unload(context.Context) error { return nil }

func (r *recorder) Reserve(_ context.Context, op sdk.Reservation) error {
	r.got <- op
	return nil
}

func (r *recorder) Release(_ context.Context, seq sdk.SeqID) error {
	r.got <- sdk.Release{Seq: seq}
	return nil
}

func (r *recorder) Step(_ context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	seqs := make([]sdk.SeqStep, len(s.Seqs))
	copy(seqs, s.Seqs)
	for i := range seqs {
		seqs[i].Allowed = append([]byte(nil), seqs[i].Allowed...) // it lies in the slot
	}
	r.got <- seqs
	out := &sdk.StepResult{ID: s.ID, Seqs: make([]sdk.SeqResult, len(r.results))}
	copy(out.Seqs, r.results)
	used := 0
	for i := range out.Seqs {
		if l := &out.Seqs[i].Logits; len(l.Data) > 0 {
			n := copy(s.Out[used:], l.Data)
			l.Data, used = s.Out[used:used+n:used+n], used+n
		}
	}
	return out, nil
}

// relay is a stage of one executor that hands everything on.
type relay struct {
	t     *testing.T
	got   chan<- any // gets errors
	steps *sdk.StepStream
	up    *uplink

	hidden sdk.Tensor
}

func (r *relay) Order(o pipeline.Order) {
	op := o.Op
	if o.Plan != nil {
		op = &sdk.Step{ID: o.ID, Seqs: o.Plan.Seqs, Hidden: r.hidden}
	}
	p, err := r.steps.Send(op)
	if err != nil {
		r.got <- err
		return
	}
	result, err := p.Wait(r.t.Context())
	if err != nil {
		r.got <- err
		return
	}
	if o.Plan != nil {
		r.up.Finished(pipeline.Tag{Epoch: o.Epoch, Step: o.ID}, result.Seqs)
	}
}

func (r *relay) Abort(pipeline.Tag) {}

// finished is a reporter of results.
type finished chan []sdk.SeqResult

func (f finished) Answered(sdk.Place, uint64, uint64, error)     {}
func (f finished) Finished(_ pipeline.Tag, rs []sdk.SeqResult)   { f <- rs }
func (f finished) Failed(_ pipeline.Tag, e *pipeline.StageError) { panic(e) }
func (f finished) Lost(uint64, *pipeline.StageError)             {}

// TestBothHops sends what an executor is told, every field of it set, over a link and then over an executor's stream, and an
// executor's answers back: a field that either forgets arrives as zero.
func TestBothHops(t *testing.T) {
	plan, executor := somePlan(), &recorder{got: make(chan any, 10), results: someResults()}
	plan.Seqs[1].Allowed, plan.Seqs[1].TopN = []byte("thirteen byte"), 2 // 100 bits
	for i := range plan.Seqs {
		executor.results[i].Seq = plan.Seqs[i].Seq
	}
	client, stop, err := sdk.InProcess(executor)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := client.Describe(t.Context()); err != nil {
		t.Fatal(err)
	}
	request := sdk.LoadRequest{Layers: sdk.LayerRange{End: 1}, HasHead: true, Region: sdk.RegionLayout{Slots: 1, InBytes: 64, OutBytes: 64, MaskBytes: 64}}
	if _, err := client.Load(t.Context(), request, nil); err != nil {
		t.Fatal(err)
	}
	steps, err := client.OpenSteps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer steps.Close()

	hidden := sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 3, Width: 4, Data: client.Region().In(0)[:48:48]}
	near, far := net.Pipe()
	port, up := NewPort(near, sdk.Place{}, 1, Config{}), newUplink(far, sdk.Place{}, "node", Config{})
	defer up.close()
	defer port.Close()
	results := make(finished, 10)
	port.Start(results)
	up.wait.Go(func() { up.serve(&relay{t, executor.got, steps, up, hidden}) })

	for i, c := range []struct {
		order pipeline.Order
		want  any
	}{
		{pipeline.Order{Op: filltest.Of[sdk.Reservation]()}, filltest.Of[sdk.Reservation]()},
		{pipeline.Order{Plan: plan}, plan.Seqs},
		{pipeline.Order{Op: filltest.Of[sdk.Release]()}, filltest.Of[sdk.Release]()},
	} {
		c.order.Epoch, c.order.ID = 1, uint64(i+1)
		port.Order(c.order)
		if got := <-executor.got; !reflect.DeepEqual(got, c.want) {
			t.Errorf("the executor got\n%+v, want\n%+v", got, c.want)
		}
	}
	if t.Failed() {
		return // nothing comes
	}
	if got := <-results; !reflect.DeepEqual(got, executor.results) {
		t.Errorf("the coordinator got\n%+v, want\n%+v", got, executor.results)
	}
}

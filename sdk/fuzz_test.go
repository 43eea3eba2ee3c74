package sdk

import (
	"math"
	"testing"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/proto"
)

// The fuzz targets feed raw messages to the conversions of both sides: whatever comes, they must not panic, and what
// they let through must be what the code behind relies on.

func FuzzOperation(f *testing.F) {
	layout := RegionLayout{Slots: 2, InBytes: 64, OutBytes: 64, MaskBytes: 4}
	mem := make([]byte, layout.Size())
	held := &loaded{
		request: LoadRequest{HasHead: true, Region: layout},
		report:  LoadReport{Boundary: Boundary{Width: 4, Dtype: DtypeFloat32}, VocabSize: 16},
	}
	for _, m := range []*pb.Operation{
		{Number: 1, Op: &pb.Operation_Step{Step: &pb.Step{Id: 1, Slot: 1, Seqs: []*pb.SeqStep{{Seq: 1, Tokens: []int32{1}, Want: pb.Want_WANT_TOKEN, Mask: &pb.Span{Offset: 1, Bytes: 2}}}, Hidden: &pb.Tensor{Dtype: 1, Rows: 1, Width: 4}}}},
		{Number: 2, Op: &pb.Operation_Reserve{Reserve: fromReservation(Reservation{Seq: 1, Prompt: []int32{1}, Sampler: Sampler{TopP: 0.5, LogitBias: map[int32]float32{1: 1}}})}},
		{Number: 3, Op: &pb.Operation_StateImport{StateImport: &pb.StateImport{Seq: 1, Layers: &pb.LayerRange{End: 1}, File: 3}}},
	} {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m pb.Operation
		if proto.Unmarshal(raw, &m) != nil {
			return
		}
		if op, err := toOp(&m); err == nil {
			if in, ok := op.(StateImport); ok && (in.Layers.Start < 0 || in.Layers.Start >= in.Layers.End) {
				t.Errorf("import %+v came through", in)
			}
		}
		if r, err := toReservation(m.GetReserve()); err == nil && (r.MaxLen < 0 || r.Keep < 0 || r.Snapshots < 0 || checkSampler(r.Sampler) != nil) {
			t.Errorf("reservation %+v came through", r)
		}
		s, err := toStep(m.GetStep(), layout, mem)
		if err != nil || held.checkStep(s) != nil {
			return
		}
		if s.Slot < 0 || s.Slot >= layout.Slots || s.Rows() < len(s.Seqs) || s.Hidden.Rows != s.Rows() || len(s.Hidden.Data) != 16*s.Rows() {
			t.Errorf("step %+v came through", s)
		}
	})
}

func FuzzCalls(f *testing.F) {
	load, err := proto.Marshal(fromLoadRequest(LoadRequest{Dir: "a", Layers: LayerRange{0, 2}, Region: RegionLayout{1, 8, 8, 8}}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(load)
	request, err := fromImportRequest(ImportRequest{Format: "gguf", Metadata: map[string]any{"a": int64(1), "b": []string{"c"}}, Tensors: []ImportTensor{{"t", "F16", []int64{1}}}})
	if err != nil {
		f.Fatal(err)
	}
	raw, err := proto.Marshal(request)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m pb.LoadRequest
		if proto.Unmarshal(raw, &m) == nil {
			if r, err := toLoadRequest(&m); err == nil && (r.Layers.Start < 0 || r.Layers.End <= r.Layers.Start || r.Region.Size() < 0) {
				t.Errorf("load request %+v came through", r)
			}
		}
		var i pb.ImportRequest
		if proto.Unmarshal(raw, &i) == nil {
			if r, err := toImportRequest(&i); err == nil {
				if _, err := fromImportRequest(r); err != nil {
					t.Errorf("import request %+v came through: %v", r, err)
				}
			}
		}
		var inspect pb.InspectRequest
		if proto.Unmarshal(raw, &inspect) == nil {
			if r, err := toInspectRequest(&inspect); err == nil && r.Dtype == DtypeInt32 {
				t.Errorf("inspect request %+v came through", r)
			}
		}
	})
}

// FuzzAnswers is the host's side: an executor may be anybody's program.
func FuzzAnswers(f *testing.F) {
	area := make([]byte, 64)
	result, err := fromStepResult(&StepResult{ID: 1, Hidden: Tensor{DtypeFloat32, 1, 4, area[:16]}, Seqs: []SeqResult{{Seq: 1, Top: []TokenScore{{1, 2, 3}}}}}, area)
	if err != nil {
		f.Fatal(err)
	}
	for _, m := range []proto.Message{
		result,
		fromDescription(&Description{Devices: []Device{{TotalMemory: 1}}, Families: make([]Family, 2)}),
		fromProfile(&ModelProfile{Layers: []LayerProfile{{}, {States: []StateProfile{{Kind: StateKV, Block: 1}}}}, Adjacency: []AdjacencyGroup{{0, 1, "x"}}}),
		fromReport(&LoadReport{Boundary: Boundary{4, DtypeFloat32}}),
		fromImportPlan(&ImportPlan{Tensors: []ImportTarget{{RowShape: []int{2, 3}, RowPerm: []int{1, 0}}}}),
	} {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var r pb.StepResult
		if proto.Unmarshal(raw, &r) == nil {
			if got, err := toStepResult(&r, area); err == nil && len(got.Hidden.Data) != got.Hidden.Rows*got.Hidden.Width*got.Hidden.Dtype.Size() {
				t.Errorf("result %+v came through", got)
			}
		}
		var d Description
		if d.UnmarshalBinary(raw) == nil {
			for _, device := range d.Devices {
				if device.Index < 0 || device.TotalMemory < 0 || device.FreeMemory < 0 {
					t.Errorf("description %+v came through", d)
				}
			}
		}
		var p ModelProfile
		if p.UnmarshalBinary(raw) == nil {
			for _, l := range p.Layers {
				if low, high := l.StateBytes(0, 0), l.StateBytes(math.MaxInt, math.MaxInt); low < 0 || high < low {
					t.Errorf("a layer %+v of %d to %d bytes came through", l, low, high)
				}
			}
			for _, a := range p.Adjacency {
				if a.Source < 0 || a.Consumer >= len(p.Layers) {
					t.Errorf("profile %+v came through", p)
				}
			}
		}
		var report LoadReport
		if err := report.UnmarshalBinary(raw); err == nil && report.Boundary.Width < 0 {
			t.Errorf("report %+v came through", report)
		}
		var plan pb.ImportPlan
		if proto.Unmarshal(raw, &plan) == nil {
			if got, err := toImportPlan(&plan); err == nil && len(got.Tensors) != len(plan.GetTensors()) {
				t.Errorf("plan %+v came through", got)
			}
		}
		var stats pb.StatsReply
		if proto.Unmarshal(raw, &stats) == nil {
			if got, err := toStats(&stats); err == nil && got.StateBytes < 0 {
				t.Errorf("stats %+v came through", got)
			}
		}
	})
}

// FuzzHosts is what comes from another host.
func FuzzHosts(f *testing.F) {
	steps, err := AppendSteps(nil, filledSteps())
	if err != nil {
		f.Fatal(err)
	}
	op, err := AppendOp(nil, filled[Reservation]())
	if err != nil {
		f.Fatal(err)
	}
	results, err := AppendResults(nil, []SeqResult{{Seq: 1, Logits: Tensor{DtypeFloat32, 1, 2, make([]byte, 8)}}})
	if err != nil {
		f.Fatal(err)
	}
	for _, raw := range [][]byte{steps, op, results} {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if seqs, err := DecodeSteps(raw); err == nil {
			for i := range seqs {
				if checkSeqStep(&seqs[i]) != nil {
					t.Errorf("step %+v came through", seqs[i])
				}
			}
			if again, err := AppendSteps(nil, seqs); err != nil || len(seqs) == 0 {
				t.Errorf("steps %+v became %q, %v", seqs, again, err)
			}
		}
		if op, err := DecodeOp(raw); err == nil {
			if _, err := AppendOp(nil, op); err != nil {
				t.Errorf("operation %+v can't be encoded: %v", op, err)
			}
		}
		if results, err := DecodeResults(raw); err == nil {
			for _, r := range results {
				if l := r.Logits; len(l.Data) != l.Rows*l.Width*l.Dtype.Size() {
					t.Errorf("logits [%d, %d] of %d bytes came through", l.Rows, l.Width, len(l.Data))
				}
			}
		}
	})
}

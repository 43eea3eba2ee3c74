package sdk

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/proto"
)

// fill sets every field of v to a value that is not zero, so that a conversion that forgets one is found.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), n)
		fill(v.Index(1), n)
	case reflect.String:
		v.SetString(strings.Repeat("x", *n%7+1))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		if v.Type() == reflect.TypeFor[Dtype]() {
			v.SetInt(int64(DtypeFloat16))
			return
		}
		if v.Type() == reflect.TypeFor[StateKind]() {
			v.SetInt(int64(StateLatent))
			return
		}
		v.SetInt(int64(*n))
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Float32:
		v.SetFloat(0.5)
	case reflect.Map:
		v.Set(reflect.ValueOf(map[int32]float32{int32(*n): 0.25}))
	default:
		panic(v.Kind())
	}
}

func filled[T any]() T {
	var v T
	n := 0
	fill(reflect.ValueOf(&v).Elem(), &n)
	return v
}

// overWire sends a message through its encoding.
func overWire[M proto.Message](t *testing.T, in M) M {
	t.Helper()
	raw, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	out := in.ProtoReflect().New().Interface().(M)
	if err := proto.Unmarshal(raw, out); err != nil {
		t.Fatal(err)
	}
	return out
}

func roundTrip[T any, M proto.Message](t *testing.T, name string, in T, from func(T) M, to func(M) (T, error)) {
	t.Run(name, func(t *testing.T) {
		out, err := to(overWire(t, from(in)))
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(in, out) {
			t.Errorf("%+v became %+v", in, out)
		}
	})
}

func TestRoundTrip(t *testing.T) {
	roundTrip(t, "description", filled[*Description](), fromDescription, toDescription)
	roundTrip(t, "inspect request", filled[InspectRequest](), fromInspectRequest, toInspectRequest)
	profile := filled[*ModelProfile]()
	profile.Adjacency = []AdjacencyGroup{{Source: 0, Consumer: 1, Reason: "shared cache"}}
	roundTrip(t, "profile", profile, fromProfile, toProfile)
	load := filled[LoadRequest]()
	load.Layers = LayerRange{Start: 1, End: 4}
	load.TPRank, load.TPSize = 1, 2
	roundTrip(t, "load request", load, fromLoadRequest, toLoadRequest)
	roundTrip(t, "load report", filled[*LoadReport](), fromReport, toReport)
	roundTrip(t, "progress", filled[LoadProgress](), fromProgress, func(m *pb.LoadProgress) (LoadProgress, error) { return toProgress(m), nil })
	roundTrip(t, "reservation", filled[Reservation](), fromReservation, toReservation)
	roundTrip(t, "stats", filled[*Stats](), fromStats, toStats)
	roundTrip(t, "import plan", filled[*ImportPlan](), fromImportPlan, toImportPlan)
	roundTrip(t, "error", filled[*Error](), fromError, func(m *pb.Error) (*Error, error) { return toError(m), nil })

	request := ImportRequest{Format: "gguf", Architecture: "llama", Tensors: []ImportTensor{{"a", "Q4_0", []int64{2, 3}}}, Metadata: map[string]any{
		"text": "a", "int": int64(-3), "uint": uint64(math.MaxUint64), "float": 0.5, "bool": true,
		"texts": []string{"a", ""}, "ints": []int64{-1, 1}, "uints": []uint64{7}, "floats": []float64{0.25}, "bools": []bool{true, false},
	}}
	roundTrip(t, "import request", request, func(r ImportRequest) *pb.ImportRequest {
		m, err := fromImportRequest(r)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}, toImportRequest)
}

// filledSteps sets every field of the steps' sequences in one of them at least.
func filledSteps() []SeqStep {
	scored, masked := filled[SeqStep](), filled[SeqStep]()
	scored.Want, scored.Rows, scored.TopN, scored.Logprob, scored.Allowed = WantScores, 2, 0, false, nil
	masked.Want, masked.Rows, masked.Seq, masked.Targets, masked.Tokens = WantToken, 1, scored.Seq+1, nil, nil
	return []SeqStep{scored, masked}
}

// TestHosts sends everything that hosts send each other through its encoding, with every field filled.
func TestHosts(t *testing.T) {
	imported := filled[StateImport]()
	imported.Layers = LayerRange{2, 5}
	exported := filled[StateExport]()
	exported.Layers = LayerRange{2, 5}
	for _, op := range []Op{filled[Reservation](), filled[Release](), imported, exported} {
		t.Run(fmt.Sprintf("%T", op), func(t *testing.T) {
			raw, err := AppendOp([]byte("before"), op)
			if err != nil || !bytes.HasPrefix(raw, []byte("before")) {
				t.Fatalf("%q, %v", raw, err)
			}
			out, err := DecodeOp(raw[len("before"):])
			if err != nil || !reflect.DeepEqual(op, out) {
				t.Errorf("%+v became %+v, %v", op, out, err)
			}
		})
	}
	if _, err := AppendOp(nil, &Step{}); CodeOf(err) != CodeInvalid {
		t.Errorf("a step as an operation: %v", err)
	}
	t.Run("steps", func(t *testing.T) {
		in := filledSteps()
		raw, err := AppendSteps(nil, in)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := DecodeSteps(raw); err != nil || !reflect.DeepEqual(in, out) {
			t.Errorf("%+v became %+v, %v", in, out, err)
		}
	})
	t.Run("results", func(t *testing.T) {
		in := []SeqResult{filled[SeqResult](), filled[SeqResult]()}
		in[0].Logits = Tensor{Dtype: DtypeFloat16, Rows: 2, Width: 3, Data: []byte("twelve bytes")}
		in[1].Logits = Tensor{}
		raw, err := AppendResults(nil, in)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := DecodeResults(raw); err != nil || !reflect.DeepEqual(in, out) {
			t.Errorf("%+v became %+v, %v", in, out, err)
		}
	})
}

// TestManyParts refuses messages whose parts would take far more memory than their bytes.
func TestManyParts(t *testing.T) {
	sequences := make([]*pb.SeqStep, MaxStepSequences+1)
	results := make([]*pb.SeqResult, MaxStepSequences+1)
	top := make([]*pb.TokenScore, maxMessages+1)
	bias := make(map[int32]float32, maxMessages+1)
	for i := range maxMessages + 1 {
		bias[int32(i)] = 0
		top[i] = &pb.TokenScore{}
	}
	for i := range sequences {
		sequences[i], results[i] = &pb.SeqStep{Seq: uint64(i)}, &pb.SeqResult{}
	}
	for name, c := range map[string]struct {
		m      proto.Message
		decode func([]byte) error
	}{
		"sequences of a step":   {&pb.Step{Seqs: sequences}, func(b []byte) error { _, err := DecodeSteps(b); return err }},
		"sequences of a result": {&pb.StepResult{Seqs: results}, func(b []byte) error { _, err := DecodeResults(b); return err }},
		"top tokens":            {&pb.StepResult{Seqs: []*pb.SeqResult{{Top: top}}}, func(b []byte) error { _, err := DecodeResults(b); return err }},
		"biases": {&pb.Operation{Op: &pb.Operation_Reserve{Reserve: &pb.Reserve{Sampler: &pb.Sampler{LogitBias: bias}}}},
			func(b []byte) error { _, err := DecodeOp(b); return err }},
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := proto.Marshal(c.m)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.decode(raw); CodeOf(err) != CodeInvalid || !strings.Contains(err.Error(), "more than") {
				t.Errorf("error %v, want one about too many", err)
			}
		})
	}
}

func TestStepRoundTrip(t *testing.T) {
	layout := RegionLayout{Slots: 3, InBytes: 64, OutBytes: 96, MaskBytes: 8}
	mem := make([]byte, layout.Size())
	in := &Step{ID: 7, Slot: 2, Out: layout.Out(mem, 2), Seqs: filledSteps()}
	in.Hidden = Tensor{Dtype: DtypeBFloat16, Rows: 3, Width: 4, Data: layout.In(mem, 2)[8:32:32]}
	m, err := fromStep(in, layout.In(mem, 2), layout.Masks(mem, 2))
	if err != nil {
		t.Fatal(err)
	}
	out, err := toStep(overWire(t, m), layout, mem)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(in, out) || &in.Hidden.Data[0] != &out.Hidden.Data[0] {
		t.Errorf("%+v became %+v", in, out)
	}
	for i := range out.Seqs {
		if mask := out.Seqs[i].Allowed; len(mask) > 0 {
			if _, within := offsetWithin(layout.Masks(mem, 2), mask); !within {
				t.Error("a mask does not lie in the slot")
			}
		}
	}
	if raw, _ := proto.Marshal(m); len(raw) > 100 {
		t.Errorf("the message has %d bytes: is bulk in it?", len(raw))
	}

	area := layout.Out(mem, 1)
	result := &StepResult{ID: 7, ComputeNanos: 5, QueueNanos: 6, Hidden: Tensor{Dtype: DtypeFloat32, Rows: 1, Width: 2, Data: area[:8:8]}, Seqs: []SeqResult{{
		Seq: 1, Token: -1, Logprob: -0.5, Top: []TokenScore{{3, 1.5, -0.25}}, Scores: []float32{-1, -2},
		Logits: Tensor{Dtype: DtypeFloat32, Rows: 1, Width: 3, Data: area[84:96:96]},
	}}}
	mr, err := fromStepResult(result, area)
	if err != nil {
		t.Fatal(err)
	}
	back, err := toStepResult(overWire(t, mr), area)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(result, back) {
		t.Errorf("%+v became %+v", result, back)
	}
}

// TestNumbers keeps the enumerations of the messages and of the contract the same.
func TestNumbers(t *testing.T) {
	for n, name := range pb.Dtype_name {
		if want := "DTYPE_" + strings.ToUpper(Dtype(n).String()); name != want {
			t.Errorf("dtype %d is %s, the contract calls it %s", n, name, want)
		}
	}
	if len(pb.Code_name) != len(codeNames) {
		t.Errorf("%d codes in the messages, %d in the contract", len(pb.Code_name), len(codeNames))
	}
	for n, name := range pb.Code_name {
		if want := "CODE_" + strings.ToUpper(Code(n).String()); name != want {
			t.Errorf("code %d is %s, the contract calls it %s", n, name, want)
		}
	}
	for n, name := range map[Want]string{WantNothing: "WANT_NOTHING", WantToken: "WANT_TOKEN", WantScores: "WANT_SCORES", WantLogits: "WANT_LOGITS"} {
		if pb.Want_name[int32(n)] != name {
			t.Errorf("want %d is %s, the contract calls it %s", n, pb.Want_name[int32(n)], name)
		}
	}
}

// TestRefused sends what no correct host sends.
func TestRefused(t *testing.T) {
	layout := RegionLayout{Slots: 2, InBytes: 64, OutBytes: 64, MaskBytes: 8}
	mem := make([]byte, layout.Size())
	load := func(change func(*pb.LoadRequest)) func() error {
		return func() error {
			m := fromLoadRequest(LoadRequest{Layers: LayerRange{0, 1}, Region: layout})
			change(m)
			_, err := toLoadRequest(m)
			return err
		}
	}
	step := func(change func(*pb.Step)) func() error {
		return func() error {
			m := &pb.Step{Seqs: []*pb.SeqStep{{Tokens: []int32{1}}}, Hidden: &pb.Tensor{Dtype: pb.Dtype_DTYPE_FLOAT32, Rows: 1, Width: 16}}
			change(m)
			_, err := toStep(m, layout, mem)
			return err
		}
	}
	reserve := func(change func(*pb.Reserve)) func() error {
		return func() error {
			m := fromReservation(Reservation{})
			change(m)
			_, err := toReservation(m)
			return err
		}
	}
	for name, c := range map[string]struct {
		convert func() error
		want    string // "" means that it is right
	}{
		"a right load":              {load(func(*pb.LoadRequest) {}), ""},
		"no layers":                 {load(func(m *pb.LoadRequest) { m.Layers = nil }), "empty"},
		"a negative layer":          {load(func(m *pb.LoadRequest) { m.Layers.Start = -1 }), "first layer"},
		"reversed layers":           {load(func(m *pb.LoadRequest) { m.Layers.Start = 2 }), "empty"},
		"no region":                 {load(func(m *pb.LoadRequest) { m.Region = nil }), "slot"},
		"a region that overflows":   {load(func(m *pb.LoadRequest) { m.Region.Slots = 1 << 40; m.Region.InBytes = 1 << 40 }), "overflows"},
		"negative threads":          {load(func(m *pb.LoadRequest) { m.Threads = -1 }), "threads"},
		"integer activations":       {load(func(m *pb.LoadRequest) { m.Dtype = pb.Dtype_DTYPE_INT32 }), "activations"},
		"an unknown dtype":          {load(func(m *pb.LoadRequest) { m.Dtype = 99 }), "dtype number 99"},
		"a rank past its group":     {load(func(m *pb.LoadRequest) { m.TpRank = 2; m.TpSize = 2 }), "rank 2"},
		"a right step":              {step(func(*pb.Step) {}), ""},
		"a slot past the last":      {step(func(m *pb.Step) { m.Slot = 2 }), "slot 2"},
		"a negative slot":           {step(func(m *pb.Step) { m.Slot = -1 }), "slot -1"},
		"no sequence":               {step(func(m *pb.Step) { m.Seqs = nil }), "no sequence"},
		"a negative number of rows": {step(func(m *pb.Step) { m.Seqs[0].Rows = -1 }), "number of rows"},
		"rows without their tokens": {step(func(m *pb.Step) { m.Seqs[0].Rows = 2 }), "1 tokens for 2 rows"},
		"a mask within the message": {step(func(m *pb.Step) { m.Seqs[0].Allowed = []byte{1} }), "put it into the slot"},
		"a mask past the end":       {step(func(m *pb.Step) { m.Seqs[0].Mask = &pb.Span{Offset: 4, Bytes: 5} }), "does not fit"},
		"a mask before the start":   {step(func(m *pb.Step) { m.Seqs[0].Mask = &pb.Span{Offset: -1, Bytes: 5} }), "does not fit"},
		"a mask without bytes":      {step(func(m *pb.Step) { m.Seqs[0].Mask = &pb.Span{} }), "does not fit"},
		"a sequence twice":          {step(func(m *pb.Step) { m.Seqs = append(m.Seqs, m.Seqs[0]) }), "twice"},
		"a negative token":          {step(func(m *pb.Step) { m.Seqs[0].Tokens[0] = -1 }), "token id -1"},
		"a negative position":       {step(func(m *pb.Step) { m.Seqs[0].Pos = -1 }), "position"},
		"a position that overflows": {step(func(m *pb.Step) { m.Seqs[0].Pos = math.MaxInt64 }), "passes the limit"},
		"an unknown want":           {step(func(m *pb.Step) { m.Seqs[0].Want = 9 }), "unknown answer 9"},
		"too few targets":           {step(func(m *pb.Step) { m.Seqs[0].Want = pb.Want_WANT_SCORES }), "0 targets, want 1"},
		"targets for nothing":       {step(func(m *pb.Step) { m.Seqs[0].Targets = []int32{1} }), "1 targets, want 0"},
		"a score for no token":      {step(func(m *pb.Step) { m.Seqs[0].Logprob = true }), "log-probability"},
		"a mask for nothing":        {step(func(m *pb.Step) { m.Seqs[0].Mask = &pb.Span{Bytes: 1} }), "mask"},
		"a tensor too large":        {step(func(m *pb.Step) { m.Hidden.Width = 17 }), "does not fit"},
		"a tensor past the end":     {step(func(m *pb.Step) { m.Hidden.Offset = 4 }), "does not fit"},
		"a tensor before the start": {step(func(m *pb.Step) { m.Hidden.Offset = -4 }), "does not fit"},
		"a tensor that overflows":   {step(func(m *pb.Step) { m.Hidden.Rows = 1 << 40; m.Hidden.Width = 1 << 40 }), "does not fit"},
		"a tensor without rows":     {step(func(m *pb.Step) { m.Hidden.Rows = 0 }), "does not fit"},
		"a tensor of no dtype":      {step(func(m *pb.Step) { m.Hidden.Dtype = 0 }), "has no size"},
		"a tensor of unknown dtype": {step(func(m *pb.Step) { m.Hidden.Dtype = 9 }), "dtype number 9"},
		"a right reservation":       {reserve(func(*pb.Reserve) {}), ""},
		"a sequence from itself":    {reserve(func(m *pb.Reserve) { m.Keep = 1 }), "of itself"},
		"negative positions kept":   {reserve(func(m *pb.Reserve) { m.Keep = -1 }), "to keep"},
		"negative snapshots":        {reserve(func(m *pb.Reserve) { m.Snapshots = -1 }), "snapshots"},
		"a generated non-token":     {reserve(func(m *pb.Reserve) { m.Generated = []int32{-1} }), "token id -1"},
		"a negative length":         {reserve(func(m *pb.Reserve) { m.MaxLen = -1 }), "maximum length"},
		"a negative prompt token":   {reserve(func(m *pb.Reserve) { m.Prompt = []int32{-2} }), "token id -2"},
		"a cold temperature":        {reserve(func(m *pb.Reserve) { m.Sampler.Temperature = -1 }), "temperature"},
		"no temperature":            {reserve(func(m *pb.Reserve) { m.Sampler.Temperature = float32(math.NaN()) }), "temperature"},
		"top-p past 1":              {reserve(func(m *pb.Reserve) { m.Sampler.TopP = 1.5 }), "top-p"},
		"an infinite penalty":       {reserve(func(m *pb.Reserve) { m.Sampler.FrequencyPenalty = float32(math.Inf(1)) }), "frequency penalty"},
		"a bias of no token":        {reserve(func(m *pb.Reserve) { m.Sampler.LogitBias = map[int32]float32{-1: 1} }), "bias"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.convert()
			if c.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || CodeOf(err) != CodeInvalid || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one of code invalid about %q", err, c.want)
			}
		})
	}
}

// TestForeignTensor hands over tensors that do not lie where they must.
func TestForeignTensor(t *testing.T) {
	mem := make([]byte, 96)
	area := mem[32:64]
	for name, data := range map[string][]byte{
		"elsewhere":          make([]byte, 8),
		"before the area":    mem[28:36],
		"past the area":      mem[60:68],
		"of another size":    area[:4],
		"without any memory": nil,
	} {
		t.Run(name, func(t *testing.T) {
			if m, err := fromTensor(Tensor{Dtype: DtypeFloat32, Rows: 1, Width: 2, Data: data}, area); err == nil {
				t.Errorf("it became %v", m)
			}
		})
	}
	m, err := fromTensor(Tensor{Dtype: DtypeFloat32, Rows: 1, Width: 2, Data: area[24:]}, area)
	if err != nil || m.GetOffset() != 24 {
		t.Errorf("a tensor at byte 24 became %v, %v", m, err)
	}
}

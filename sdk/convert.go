package sdk

import (
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
)

// Conversions between the contract's types and its messages. What comes in is distrusted: a number that no
// correct peer sends is an error here, so that the code behind never meets it. Tensors are converted in
// tensors.go, where the slot that they must lie in is known.

func toDtype(d pb.Dtype) (Dtype, error) {
	if _, ok := pb.Dtype_name[int32(d)]; !ok {
		return 0, Errorf(CodeInvalid, "unknown dtype number %d: host and executor disagree on the contract", d)
	}
	return Dtype(d), nil
}

// toCount checks a number that counts or sizes something.
func toCount(what string, n int64) (int, error) {
	if n < 0 || n > math.MaxInt {
		return 0, Errorf(CodeInvalid, "%s is %d, want a number from 0", what, n)
	}
	return int(n), nil
}

// counts checks several numbers and stops at the first bad one.
type counts struct{ err error }

func (c *counts) to(what string, n int64) int {
	v, err := toCount(what, n)
	if c.err == nil {
		c.err = err
	}
	return v
}

func toError(e *pb.Error) *Error {
	code := Code(e.GetCode())
	if _, ok := pb.Code_name[int32(e.GetCode())]; !ok {
		code = CodeInternal
	}
	return &Error{
		Code: code, Message: e.GetMessage(), File: e.GetFile(), Tensor: e.GetTensor(),
		Wanted: max(0, e.GetWanted()), Held: max(0, e.GetHeld()),
	}
}

func fromError(e *Error) *pb.Error {
	return &pb.Error{Code: pb.Code(e.Code), Message: e.Message, File: e.File, Tensor: e.Tensor, Wanted: e.Wanted, Held: e.Held}
}

func toDescription(m *pb.Description) (*Description, error) {
	version, err := toCount("contract version", m.GetContractVersion())
	if err != nil {
		return nil, err
	}
	d := &Description{
		Name:            m.GetName(),
		Version:         m.GetVersion(),
		ContractVersion: version,
		Runtime:         m.GetRuntime(),
		Capabilities:    m.GetCapabilities(),
	}
	for _, v := range m.GetDevices() {
		device, err := toDevice(v)
		if err != nil {
			return nil, err
		}
		d.Devices = append(d.Devices, *device)
	}
	for _, f := range m.GetFamilies() {
		d.Families = append(d.Families, *toFamily(f))
	}
	return d, nil
}

func fromDescription(d *Description) *pb.Description {
	m := &pb.Description{
		Name:            d.Name,
		Version:         d.Version,
		ContractVersion: int64(d.ContractVersion),
		Runtime:         d.Runtime,
		Capabilities:    d.Capabilities,
	}
	for i := range d.Devices {
		m.Devices = append(m.Devices, fromDevice(&d.Devices[i]))
	}
	for i := range d.Families {
		m.Families = append(m.Families, fromFamily(&d.Families[i]))
	}
	return m
}

func toDevice(m *pb.Device) (*Device, error) {
	var c counts
	d := &Device{
		Index:       c.to("device index", m.GetIndex()),
		Kind:        m.GetKind(),
		Name:        m.GetName(),
		TotalMemory: int64(c.to("device memory", m.GetTotalMemory())),
		FreeMemory:  int64(c.to("free device memory", m.GetFreeMemory())),
		Numerics: Numerics{
			BatchInvariant: m.GetNumerics().GetBatchInvariant(),
			ChunkInvariant: m.GetNumerics().GetChunkInvariant(),
		},
	}
	return d, c.err
}

func fromDevice(d *Device) *pb.Device {
	return &pb.Device{
		Index:       int64(d.Index),
		Kind:        d.Kind,
		Name:        d.Name,
		TotalMemory: d.TotalMemory,
		FreeMemory:  d.FreeMemory,
		Numerics: &pb.Numerics{
			BatchInvariant: d.Numerics.BatchInvariant,
			ChunkInvariant: d.Numerics.ChunkInvariant,
		},
	}
}

func toFamily(m *pb.Family) *Family {
	return &Family{
		Name:          m.GetName(),
		ModelTypes:    m.GetModelTypes(),
		Pipeline:      m.GetPipeline(),
		TensorShards:  m.GetTensorShards(),
		Adapters:      m.GetAdapters(),
		PlanOnly:      m.GetPlanOnly(),
		Quantizations: m.GetQuantizations(),
		Imports:       m.GetImports(),
	}
}

func fromFamily(f *Family) *pb.Family {
	return &pb.Family{
		Name:          f.Name,
		ModelTypes:    f.ModelTypes,
		Pipeline:      f.Pipeline,
		TensorShards:  f.TensorShards,
		Adapters:      f.Adapters,
		PlanOnly:      f.PlanOnly,
		Quantizations: f.Quantizations,
		Imports:       f.Imports,
	}
}

func toInspectRequest(m *pb.InspectRequest) (InspectRequest, error) {
	dtype, err := toActivations(m.GetDtype())
	return InspectRequest{Dir: m.GetDir(), Dtype: dtype}, err
}

func fromInspectRequest(r InspectRequest) *pb.InspectRequest {
	return &pb.InspectRequest{Dir: r.Dir, Dtype: pb.Dtype(r.Dtype)}
}

// toActivations reads the dtype that a request asks for.
func toActivations(m pb.Dtype) (Dtype, error) {
	d, err := toDtype(m)
	if err == nil && d == DtypeInt32 {
		err = Errorf(CodeInvalid, "dtype %v can't hold activations: use auto, float32, bfloat16 or float16", d)
	}
	return d, err
}

func toBoundary(m *pb.Boundary) (Boundary, error) {
	var c counts
	b := Boundary{Width: c.to("boundary width", m.GetWidth())}
	if c.err != nil {
		return b, c.err
	}
	var err error
	b.Dtype, err = toDtype(m.GetDtype())
	return b, err
}

func fromBoundary(b Boundary) *pb.Boundary {
	return &pb.Boundary{Width: int64(b.Width), Dtype: pb.Dtype(b.Dtype)}
}

func toProfile(m *pb.ModelProfile) (*ModelProfile, error) {
	var c counts
	p := &ModelProfile{
		Family:        m.GetFamily(),
		ModelType:     m.GetModelType(),
		Embedding:     int64(c.to("embedding bytes", m.GetEmbedding())),
		Head:          int64(c.to("head bytes", m.GetHead())),
		Tied:          m.GetTied(),
		TiedBytes:     int64(c.to("tied bytes", m.GetTiedBytes())),
		ContextLength: c.to("context length", m.GetContextLength()),
		VocabSize:     c.to("vocabulary size", m.GetVocabSize()),
		HiddenSize:    c.to("hidden size", m.GetHiddenSize()),
		Quantization:  m.GetQuantization(),
		Exact:         m.GetExact(),
	}
	if c.err != nil {
		return nil, c.err
	}
	for i, l := range m.GetLayers() {
		layer, err := toLayer(l)
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", i, err)
		}
		p.Layers = append(p.Layers, layer)
	}
	for _, a := range m.GetAdjacency() {
		source, consumer := a.GetSource(), a.GetConsumer()
		if source < 0 || consumer < source || consumer >= int64(len(p.Layers)) {
			return nil, Errorf(CodeInvalid, "adjacency group [%d, %d] does not lie within %d layers", source, consumer, len(p.Layers))
		}
		p.Adjacency = append(p.Adjacency, AdjacencyGroup{Source: int(source), Consumer: int(consumer), Reason: a.GetReason()})
	}
	var err error
	p.Boundary, err = toBoundary(m.GetBoundary())
	return p, err
}

func toLayer(m *pb.LayerProfile) (LayerProfile, error) {
	var c counts
	l := LayerProfile{
		Kind:    m.GetKind(),
		Weights: int64(c.to("weight bytes", m.GetWeights())),
	}
	for i, s := range m.GetStates() {
		state, err := toStateProfile(s)
		if err != nil {
			return l, fmt.Errorf("state %d: %w", i, err)
		}
		l.States = append(l.States, state)
	}
	return l, c.err
}

func toStateProfile(m *pb.StateProfile) (StateProfile, error) {
	kind := StateKind(m.GetKind())
	if kind < StateKV || kind > StateRecurrent {
		return StateProfile{}, Errorf(CodeInvalid, "unknown kind of state %d: host and executor disagree on the contract", m.GetKind())
	}
	var c counts
	s := StateProfile{
		Kind:             kind,
		BytesPerPosition: int64(c.to("state bytes per position", m.GetBytesPerPosition())),
		Window:           c.to("state window", m.GetWindow()),
		Fixed:            int64(c.to("fixed state bytes", m.GetFixed())),
		Block:            c.to("state block", m.GetBlock()),
	}
	return s, c.err
}

func fromStateProfile(s StateProfile) *pb.StateProfile {
	return &pb.StateProfile{
		Kind:             pb.StateKind(s.Kind),
		BytesPerPosition: s.BytesPerPosition,
		Window:           int64(s.Window),
		Fixed:            s.Fixed,
		Block:            int64(s.Block),
	}
}

func fromProfile(p *ModelProfile) *pb.ModelProfile {
	m := &pb.ModelProfile{
		Family:        p.Family,
		ModelType:     p.ModelType,
		Embedding:     p.Embedding,
		Head:          p.Head,
		Tied:          p.Tied,
		TiedBytes:     p.TiedBytes,
		Boundary:      fromBoundary(p.Boundary),
		ContextLength: int64(p.ContextLength),
		VocabSize:     int64(p.VocabSize),
		HiddenSize:    int64(p.HiddenSize),
		Quantization:  p.Quantization,
		Exact:         p.Exact,
	}
	for _, l := range p.Layers {
		layer := &pb.LayerProfile{Kind: l.Kind, Weights: l.Weights}
		for _, s := range l.States {
			layer.States = append(layer.States, fromStateProfile(s))
		}
		m.Layers = append(m.Layers, layer)
	}
	for _, a := range p.Adjacency {
		m.Adjacency = append(m.Adjacency, &pb.AdjacencyGroup{Source: int64(a.Source), Consumer: int64(a.Consumer), Reason: a.Reason})
	}
	return m
}

func toLayout(m *pb.RegionLayout) (RegionLayout, error) {
	l := RegionLayout{Slots: int(m.GetSlots()), InBytes: int(m.GetInBytes()), OutBytes: int(m.GetOutBytes()), MaskBytes: int(m.GetMaskBytes())}
	if err := l.Validate(); err != nil {
		return l, Errorf(CodeInvalid, "%v", err)
	}
	return l, nil
}

func toLoadRequest(m *pb.LoadRequest) (LoadRequest, error) {
	var c counts
	r := LoadRequest{
		Dir:    m.GetDir(),
		Family: m.GetFamily(),
		Layers: LayerRange{
			Start: c.to("first layer", m.GetLayers().GetStart()),
			End:   c.to("layer after the last", m.GetLayers().GetEnd()),
		},
		HasEmbedding: m.GetHasEmbedding(),
		HasHead:      m.GetHasHead(),
		Device:       c.to("device", m.GetDevice()),
		Threads:      c.to("threads", m.GetThreads()),
		KVBudget:     int64(c.to("kv budget", m.GetKvBudget())),
		TPRank:       c.to("tensor-parallel rank", m.GetTpRank()),
		TPSize:       c.to("tensor-parallel size", m.GetTpSize()),
		Adapter:      m.GetAdapter(),
	}
	if c.err != nil {
		return r, c.err
	}
	if r.Layers.Start >= r.Layers.End {
		return r, Errorf(CodeInvalid, "layer range [%d, %d) is empty", r.Layers.Start, r.Layers.End)
	}
	if r.TPRank >= max(r.TPSize, 1) {
		return r, Errorf(CodeInvalid, "tensor-parallel rank %d is not below the group's size %d", r.TPRank, r.TPSize)
	}
	var err error
	if r.Dtype, err = toActivations(m.GetDtype()); err != nil {
		return r, err
	}
	r.Region, err = toLayout(m.GetRegion())
	return r, err
}

func fromLoadRequest(r LoadRequest) *pb.LoadRequest {
	return &pb.LoadRequest{
		Dir:          r.Dir,
		Family:       r.Family,
		Layers:       &pb.LayerRange{Start: int64(r.Layers.Start), End: int64(r.Layers.End)},
		HasEmbedding: r.HasEmbedding,
		HasHead:      r.HasHead,
		Dtype:        pb.Dtype(r.Dtype),
		Device:       int64(r.Device),
		Threads:      int64(r.Threads),
		KvBudget:     r.KVBudget,
		TpRank:       int64(r.TPRank),
		TpSize:       int64(r.TPSize),
		Adapter:      r.Adapter,
		Region: &pb.RegionLayout{
			Slots:     int64(r.Region.Slots),
			InBytes:   int64(r.Region.InBytes),
			OutBytes:  int64(r.Region.OutBytes),
			MaskBytes: int64(r.Region.MaskBytes),
		},
	}
}

func toProgress(m *pb.LoadProgress) LoadProgress {
	return LoadProgress{Loaded: m.GetLoaded(), Total: m.GetTotal(), Tensor: m.GetTensor()}
}

func fromProgress(p LoadProgress) *pb.LoadProgress {
	return &pb.LoadProgress{Loaded: p.Loaded, Total: p.Total, Tensor: p.Tensor}
}

func toReport(m *pb.LoadReport) (*LoadReport, error) {
	var c counts
	r := &LoadReport{
		WeightBytes: int64(c.to("weight bytes", m.GetWeightBytes())),
		Tensors:     c.to("tensors", m.GetTensors()),
		VocabSize:   c.to("vocabulary size", m.GetVocabSize()),
	}
	if c.err != nil {
		return nil, c.err
	}
	var err error
	r.Boundary, err = toBoundary(m.GetBoundary())
	return r, err
}

func fromReport(r *LoadReport) *pb.LoadReport {
	return &pb.LoadReport{
		WeightBytes: r.WeightBytes,
		Tensors:     int64(r.Tensors),
		Boundary:    fromBoundary(r.Boundary),
		VocabSize:   int64(r.VocabSize),
	}
}

func toSampler(m *pb.Sampler) (Sampler, error) {
	var c counts
	s := Sampler{
		Temperature:       m.GetTemperature(),
		TopP:              m.GetTopP(),
		TopK:              c.to("top-k", m.GetTopK()),
		MinP:              m.GetMinP(),
		RepetitionPenalty: m.GetRepetitionPenalty(),
		PresencePenalty:   m.GetPresencePenalty(),
		FrequencyPenalty:  m.GetFrequencyPenalty(),
		Seed:              m.GetSeed(),
		Choice:            m.GetChoice(),
		LogitBias:         m.GetLogitBias(),
	}
	if c.err != nil {
		return s, c.err
	}
	return s, checkSampler(s)
}

// checkSampler refuses what no sampler can follow. The comparisons are written so that NaN fails them.
func checkSampler(s Sampler) error {
	for _, f := range []struct {
		name  string
		value float32
		ok    bool
	}{
		{"temperature", s.Temperature, s.Temperature >= 0},
		{"top-p", s.TopP, s.TopP >= 0 && s.TopP <= 1},
		{"min-p", s.MinP, s.MinP >= 0 && s.MinP <= 1},
		{"repetition penalty", s.RepetitionPenalty, s.RepetitionPenalty >= 0},
		{"presence penalty", s.PresencePenalty, true},
		{"frequency penalty", s.FrequencyPenalty, true},
	} {
		if !f.ok || !finite(f.value) {
			return Errorf(CodeInvalid, "%s is %v, which is out of its range", f.name, f.value)
		}
	}
	for token, bias := range s.LogitBias {
		if token < 0 || math.IsNaN(float64(bias)) {
			return Errorf(CodeInvalid, "logit bias %v of token %d makes no sense", bias, token)
		}
	}
	return nil
}

func finite(f float32) bool { return !math.IsNaN(float64(f)) && !math.IsInf(float64(f), 0) }

func fromSampler(s Sampler) *pb.Sampler {
	return &pb.Sampler{
		Temperature:       s.Temperature,
		TopP:              s.TopP,
		TopK:              int64(s.TopK),
		MinP:              s.MinP,
		RepetitionPenalty: s.RepetitionPenalty,
		PresencePenalty:   s.PresencePenalty,
		FrequencyPenalty:  s.FrequencyPenalty,
		Seed:              s.Seed,
		Choice:            s.Choice,
		LogitBias:         s.LogitBias,
	}
}

func checkTokens(tokens []int32) error {
	for _, t := range tokens {
		if t < 0 {
			return Errorf(CodeInvalid, "token id %d is negative", t)
		}
	}
	return nil
}

func toStats(m *pb.StatsReply) (*Stats, error) {
	var c counts
	s := &Stats{
		Loaded:        m.GetLoaded(),
		Steps:         m.GetSteps(),
		Sequences:     c.to("sequences", m.GetSequences()),
		WeightBytes:   int64(c.to("weight bytes", m.GetWeightBytes())),
		StateBytes:    int64(c.to("state bytes", m.GetStateBytes())),
		ScratchBytes:  int64(c.to("scratch bytes", m.GetScratchBytes())),
		PeakBytes:     int64(c.to("peak bytes", m.GetPeakBytes())),
		ResidentBytes: int64(c.to("resident bytes", m.GetResidentBytes())),
		BusyNanos:     int64(c.to("busy nanoseconds", m.GetBusyNanos())),
	}
	return s, c.err
}

func fromStats(s *Stats) *pb.StatsReply {
	return &pb.StatsReply{
		Loaded:        s.Loaded,
		Steps:         s.Steps,
		Sequences:     int64(s.Sequences),
		WeightBytes:   s.WeightBytes,
		StateBytes:    s.StateBytes,
		ScratchBytes:  s.ScratchBytes,
		PeakBytes:     s.PeakBytes,
		ResidentBytes: s.ResidentBytes,
		BusyNanos:     s.BusyNanos,
	}
}

func toImportRequest(m *pb.ImportRequest) (ImportRequest, error) {
	r := ImportRequest{
		Format:       m.GetFormat(),
		Architecture: m.GetArchitecture(),
		Metadata:     make(map[string]any, len(m.GetMetadata())),
	}
	for key, value := range m.GetMetadata() {
		v, err := toValue(value)
		if err != nil {
			return r, Errorf(CodeInvalid, "metadata key %q: %v", key, err)
		}
		r.Metadata[key] = v
	}
	for _, t := range m.GetTensors() {
		for _, dim := range t.GetShape() {
			if dim < 0 {
				return r, &Error{Code: CodeInvalid, Message: fmt.Sprintf("tensor %q has the shape %v", t.GetName(), t.GetShape()), Tensor: t.GetName()}
			}
		}
		r.Tensors = append(r.Tensors, ImportTensor{Name: t.GetName(), Type: t.GetType(), Shape: t.GetShape()})
	}
	return r, nil
}

func fromImportRequest(r ImportRequest) (*pb.ImportRequest, error) {
	m := &pb.ImportRequest{
		Format:       r.Format,
		Architecture: r.Architecture,
		Metadata:     make(map[string]*pb.Value, len(r.Metadata)),
	}
	for key, value := range r.Metadata {
		v, err := fromValue(value)
		if err != nil {
			return nil, fmt.Errorf("metadata key %q: %w", key, err)
		}
		m.Metadata[key] = v
	}
	for _, t := range r.Tensors {
		m.Tensors = append(m.Tensors, &pb.ImportTensor{Name: t.Name, Type: t.Type, Shape: t.Shape})
	}
	return m, nil
}

func toValue(m *pb.Value) (any, error) {
	switch v := m.GetValue().(type) {
	case *pb.Value_Text:
		return v.Text, nil
	case *pb.Value_Int:
		return v.Int, nil
	case *pb.Value_Uint:
		return v.Uint, nil
	case *pb.Value_Float:
		return v.Float, nil
	case *pb.Value_Bool:
		return v.Bool, nil
	case *pb.Value_Texts:
		return v.Texts.GetValues(), nil
	case *pb.Value_Ints:
		return v.Ints.GetValues(), nil
	case *pb.Value_Uints:
		return v.Uints.GetValues(), nil
	case *pb.Value_Floats:
		return v.Floats.GetValues(), nil
	case *pb.Value_Bools:
		return v.Bools.GetValues(), nil
	}
	return nil, fmt.Errorf("no value")
}

func fromValue(value any) (*pb.Value, error) {
	switch v := value.(type) {
	case string:
		return &pb.Value{Value: &pb.Value_Text{Text: v}}, nil
	case int64:
		return &pb.Value{Value: &pb.Value_Int{Int: v}}, nil
	case uint64:
		return &pb.Value{Value: &pb.Value_Uint{Uint: v}}, nil
	case float64:
		return &pb.Value{Value: &pb.Value_Float{Float: v}}, nil
	case bool:
		return &pb.Value{Value: &pb.Value_Bool{Bool: v}}, nil
	case []string:
		return &pb.Value{Value: &pb.Value_Texts{Texts: &pb.Texts{Values: v}}}, nil
	case []int64:
		return &pb.Value{Value: &pb.Value_Ints{Ints: &pb.Ints{Values: v}}}, nil
	case []uint64:
		return &pb.Value{Value: &pb.Value_Uints{Uints: &pb.Uints{Values: v}}}, nil
	case []float64:
		return &pb.Value{Value: &pb.Value_Floats{Floats: &pb.Floats{Values: v}}}, nil
	case []bool:
		return &pb.Value{Value: &pb.Value_Bools{Bools: &pb.Bools{Values: v}}}, nil
	}
	return nil, fmt.Errorf("type %T can't cross the contract: use string, int64, uint64, float64, bool or a slice of one", value)
}

func toImportPlan(m *pb.ImportPlan) (*ImportPlan, error) {
	p := &ImportPlan{Family: m.GetFamily(), Config: m.GetConfig(), Skipped: m.GetSkipped()}
	for _, t := range m.GetTensors() {
		var c counts
		target := ImportTarget{Source: t.GetSource(), Target: t.GetTarget(), Suffix: t.GetSuffix()}
		for _, n := range t.GetRowShape() {
			target.RowShape = append(target.RowShape, c.to("row shape", n))
		}
		for _, n := range t.GetRowPerm() {
			target.RowPerm = append(target.RowPerm, c.to("row permutation", n))
		}
		if c.err != nil {
			return nil, fmt.Errorf("import target %q: %w", target.Target, c.err)
		}
		p.Tensors = append(p.Tensors, target)
	}
	return p, nil
}

func fromImportPlan(p *ImportPlan) *pb.ImportPlan {
	m := &pb.ImportPlan{Family: p.Family, Config: p.Config, Skipped: p.Skipped}
	for _, t := range p.Tensors {
		m.Tensors = append(m.Tensors, &pb.ImportTarget{
			Source:   t.Source,
			Target:   t.Target,
			Suffix:   t.Suffix,
			RowShape: toInt64s(t.RowShape),
			RowPerm:  toInt64s(t.RowPerm),
		})
	}
	return m
}

func toInt64s(list []int) []int64 {
	var out []int64
	for _, n := range list {
		out = append(out, int64(n))
	}
	return out
}

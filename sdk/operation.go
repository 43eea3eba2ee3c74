package sdk

import (
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
)

// Operations, steps and their results have one encoding: the messages here go over the step stream to an executor, and
// from host to host. Bulk is the only difference: to an executor it lies in the shared region and the message says where,
// between hosts it is within the message.

// fromOp makes the message of an operation other than a step.
func fromOp(op Op) (*pb.Operation, error) {
	switch op := op.(type) {
	case Reservation:
		return &pb.Operation{Op: &pb.Operation_Reserve{Reserve: fromReservation(op)}}, nil
	case Release:
		return &pb.Operation{Op: &pb.Operation_Release{Release: &pb.Release{Seq: uint64(op.Seq)}}}, nil
	case StateExport:
		return &pb.Operation{Op: &pb.Operation_StateExport{StateExport: &pb.StateExport{
			Seq: uint64(op.Seq), Layers: fromLayers(op.Layers), File: op.Descriptor,
		}}}, nil
	case StateImport:
		return &pb.Operation{Op: &pb.Operation_StateImport{StateImport: &pb.StateImport{
			Seq: uint64(op.Seq), Layers: fromLayers(op.Layers), File: op.Descriptor,
		}}}, nil
	}
	return nil, Errorf(CodeInvalid, "an operation of type %T is none of this contract", op)
}

// toOp reads the message of an operation other than a step.
func toOp(m *pb.Operation) (Op, error) {
	switch op := m.GetOp().(type) {
	case *pb.Operation_Reserve:
		return toReservation(op.Reserve)
	case *pb.Operation_Release:
		return Release{Seq: SeqID(op.Release.GetSeq())}, nil
	case *pb.Operation_StateExport:
		layers, err := toLayers(op.StateExport.GetLayers())
		return StateExport{Seq: SeqID(op.StateExport.GetSeq()), Layers: layers, Descriptor: op.StateExport.GetFile()}, err
	case *pb.Operation_StateImport:
		layers, err := toLayers(op.StateImport.GetLayers())
		return StateImport{Seq: SeqID(op.StateImport.GetSeq()), Layers: layers, Descriptor: op.StateImport.GetFile()}, err
	}
	return nil, Errorf(CodeInvalid, "operation %d says nothing that this contract version knows", m.GetNumber())
}

func fromLayers(l LayerRange) *pb.LayerRange {
	return &pb.LayerRange{Start: int64(l.Start), End: int64(l.End)}
}

func toLayers(m *pb.LayerRange) (LayerRange, error) {
	var c counts
	l := LayerRange{Start: c.to("first layer", m.GetStart()), End: c.to("layer after the last", m.GetEnd())}
	if c.err == nil && l.Start >= l.End {
		return l, Errorf(CodeInvalid, "layer range [%d, %d) is empty", l.Start, l.End)
	}
	return l, c.err
}

func fromReservation(r Reservation) *pb.Reserve {
	return &pb.Reserve{
		Seq:       uint64(r.Seq),
		Prompt:    r.Prompt,
		MaxLen:    int64(r.MaxLen),
		Sampler:   fromSampler(r.Sampler),
		Adapter:   r.Adapter,
		From:      uint64(r.From),
		Keep:      int64(r.Keep),
		Generated: r.Generated,
		Snapshots: int64(r.Snapshots),
	}
}

func toReservation(m *pb.Reserve) (Reservation, error) {
	var c counts
	r := Reservation{
		Seq:       SeqID(m.GetSeq()),
		Prompt:    m.GetPrompt(),
		MaxLen:    c.to("maximum length", m.GetMaxLen()),
		Adapter:   m.GetAdapter(),
		From:      SeqID(m.GetFrom()),
		Keep:      c.to("positions to keep", m.GetKeep()),
		Generated: m.GetGenerated(),
		Snapshots: c.to("number of snapshots", m.GetSnapshots()),
	}
	if c.err != nil {
		return r, c.err
	}
	for _, tokens := range [][]int32{r.Prompt, r.Generated} {
		if err := checkTokens(tokens); err != nil {
			return r, err
		}
	}
	if r.Keep > 0 && r.From == r.Seq {
		return r, Errorf(CodeInvalid, "sequence %d can't begin with positions of itself", r.Seq)
	}
	var err error
	r.Sampler, err = toSampler(m.GetSampler())
	return r, err
}

// fromSeqStep makes the message of a sequence's rows but for its mask. One row, or as many as there are tokens, go unsaid.
func fromSeqStep(s *SeqStep) *pb.SeqStep {
	m := &pb.SeqStep{
		Seq:      uint64(s.Seq),
		Pos:      int64(s.Pos),
		Tokens:   s.Tokens,
		Prompt:   s.Prompt,
		Snapshot: s.Snapshot,
		Want:     pb.Want(s.Want),
		TopN:     int64(s.TopN),
		Logprob:  s.Logprob,
		Targets:  s.Targets,
	}
	if s.Rows != max(1, len(s.Tokens)) {
		m.Rows = int64(s.Rows)
	}
	return m
}

// toSeqStep reads a sequence's rows; allowed is its mask.
func toSeqStep(m *pb.SeqStep, allowed []byte) (SeqStep, error) {
	var c counts
	s := SeqStep{
		Seq:      SeqID(m.GetSeq()),
		Pos:      c.to("position", m.GetPos()),
		Rows:     c.to("number of rows", m.GetRows()),
		Tokens:   m.GetTokens(),
		Prompt:   m.GetPrompt(),
		Snapshot: m.GetSnapshot(),
		Want:     Want(m.GetWant()),
		TopN:     c.to("number of top tokens", m.GetTopN()),
		Logprob:  m.GetLogprob(),
		Targets:  m.GetTargets(),
		Allowed:  allowed,
	}
	if c.err != nil {
		return s, c.err
	}
	if s.Rows == 0 {
		s.Rows = max(1, len(s.Tokens))
	}
	return s, checkSeqStep(&s)
}

func checkSeqStep(s *SeqStep) error {
	if s.Rows < 1 {
		return Errorf(CodeInvalid, "sequence %d has no rows in the step", s.Seq)
	}
	if n := len(s.Tokens); n != 0 && n != s.Rows {
		return Errorf(CodeInvalid, "sequence %d has %d tokens for %d rows", s.Seq, n, s.Rows)
	}
	if err := checkTokens(s.Tokens); err != nil {
		return err
	}
	if s.Pos > math.MaxInt32-s.Rows {
		return Errorf(CodeInvalid, "sequence %d: position %d with %d rows passes the limit of %d", s.Seq, s.Pos, s.Rows, math.MaxInt32)
	}
	if _, ok := pb.Want_name[int32(s.Want)]; !ok {
		return Errorf(CodeInvalid, "sequence %d wants unknown answer %d", s.Seq, s.Want)
	}
	targets := 0
	if s.Want == WantScores {
		targets = s.Rows
	}
	if len(s.Targets) != targets {
		return Errorf(CodeInvalid, "sequence %d has %d targets, want %d", s.Seq, len(s.Targets), targets)
	}
	if err := checkTokens(s.Targets); err != nil {
		return err
	}
	if s.Want != WantToken && (s.TopN != 0 || s.Logprob || len(s.Allowed) != 0) {
		return Errorf(CodeInvalid, "sequence %d: top tokens, a log-probability and a mask go with a wanted token only", s.Seq)
	}
	return nil
}

// fromStep makes the message of a step for an executor. The sequences' masks are copied into masks, the slot's area.
func fromStep(s *Step, in, masks []byte) (*pb.Step, error) {
	hidden, err := fromTensor(s.Hidden, in)
	if err != nil {
		return nil, err
	}
	m := &pb.Step{Id: s.ID, Slot: int64(s.Slot), Hidden: hidden, Seqs: make([]*pb.SeqStep, len(s.Seqs))}
	used := 0
	for i := range s.Seqs {
		q := &s.Seqs[i]
		m.Seqs[i] = fromSeqStep(q)
		if n := len(q.Allowed); n > 0 {
			if n > len(masks)-used {
				return nil, Errorf(CodeInvalid, "the masks of step %d pass its slot's %d bytes: raise the region layout's MaskBytes", s.ID, len(masks))
			}
			copy(masks[used:], q.Allowed)
			m.Seqs[i].Mask = &pb.Span{Offset: int64(used), Bytes: int64(n)}
			used += n
		}
	}
	return m, nil
}

// toStep reads a step as an executor gets it: tensors and masks are the slot's memory.
func toStep(m *pb.Step, layout RegionLayout, mem []byte) (*Step, error) {
	if m.GetSlot() < 0 || m.GetSlot() >= int64(layout.Slots) {
		return nil, Errorf(CodeInvalid, "step %d names slot %d of %d", m.GetId(), m.GetSlot(), layout.Slots)
	}
	s := &Step{ID: m.GetId(), Slot: int(m.GetSlot())}
	s.Out = layout.Out(mem, s.Slot)
	var err error
	if s.Seqs, err = toSeqSteps(m.GetSeqs(), func(q *pb.SeqStep) ([]byte, error) { return toMask(q, layout.Masks(mem, s.Slot)) }); err != nil {
		return nil, fmt.Errorf("step %d: %w", s.ID, err)
	}
	s.Hidden, err = toTensor(m.GetHidden(), layout.In(mem, s.Slot))
	return s, err
}

// toMask finds a sequence's mask in the slot's mask area.
func toMask(m *pb.SeqStep, masks []byte) ([]byte, error) {
	if len(m.GetAllowed()) > 0 {
		return nil, Errorf(CodeInvalid, "the mask of sequence %d lies in the message: put it into the slot", m.GetSeq())
	}
	span := m.GetMask()
	if span == nil {
		return nil, nil
	}
	offset, bytes := span.GetOffset(), span.GetBytes()
	if offset < 0 || bytes < 1 || offset > int64(len(masks)) || bytes > int64(len(masks))-offset {
		return nil, Errorf(CodeInvalid, "the mask of sequence %d, %d bytes at byte %d, does not fit its slot's %d bytes", m.GetSeq(), bytes, offset, len(masks))
	}
	return masks[offset : offset+bytes : offset+bytes], nil
}

func toSeqSteps(list []*pb.SeqStep, mask func(*pb.SeqStep) ([]byte, error)) ([]SeqStep, error) {
	if len(list) == 0 {
		return nil, Errorf(CodeInvalid, "a step has no sequence")
	}
	seqs := make([]SeqStep, len(list))
	seen := make(map[SeqID]struct{}, len(list))
	for i, m := range list {
		allowed, err := mask(m)
		if err != nil {
			return nil, err
		}
		if seqs[i], err = toSeqStep(m, allowed); err != nil {
			return nil, err
		}
		if _, twice := seen[seqs[i].Seq]; twice {
			return nil, Errorf(CodeInvalid, "a step names sequence %d twice", seqs[i].Seq)
		}
		seen[seqs[i].Seq] = struct{}{}
	}
	return seqs, nil
}

// fromSeqResult makes the message of a sequence's answer but for its logits.
func fromSeqResult(r *SeqResult) *pb.SeqResult {
	m := &pb.SeqResult{Seq: uint64(r.Seq), Token: r.Token, Logprob: r.Logprob, Scores: r.Scores}
	for _, t := range r.Top {
		m.Top = append(m.Top, &pb.TokenScore{Token: t.Token, Logit: t.Logit, Logprob: t.Logprob})
	}
	return m
}

func toSeqResult(m *pb.SeqResult, logits Tensor) SeqResult {
	r := SeqResult{Seq: SeqID(m.GetSeq()), Token: m.GetToken(), Logprob: m.GetLogprob(), Scores: m.GetScores(), Logits: logits}
	for _, t := range m.GetTop() {
		r.Top = append(r.Top, TokenScore{Token: t.GetToken(), Logit: t.GetLogit(), Logprob: t.GetLogprob()})
	}
	return r
}

func fromStepResult(r *StepResult, out []byte) (*pb.StepResult, error) {
	hidden, err := fromTensor(r.Hidden, out)
	if err != nil {
		return nil, err
	}
	m := &pb.StepResult{Id: r.ID, Hidden: hidden, ComputeNanos: r.ComputeNanos, QueueNanos: r.QueueNanos}
	for i := range r.Seqs {
		result := fromSeqResult(&r.Seqs[i])
		if result.Logits, err = fromTensor(r.Seqs[i].Logits, out); err != nil {
			return nil, err
		}
		m.Seqs = append(m.Seqs, result)
	}
	return m, nil
}

func toStepResult(m *pb.StepResult, out []byte) (*StepResult, error) {
	hidden, err := toTensor(m.GetHidden(), out)
	if err != nil {
		return nil, err
	}
	r := &StepResult{ID: m.GetId(), Hidden: hidden, ComputeNanos: max(0, m.GetComputeNanos()), QueueNanos: max(0, m.GetQueueNanos())}
	for _, s := range m.GetSeqs() {
		logits, err := toTensor(s.GetLogits(), out)
		if err != nil {
			return nil, err
		}
		r.Seqs = append(r.Seqs, toSeqResult(s, logits))
	}
	return r, nil
}

func toStateReport(m *pb.StateReport) (StateReport, error) {
	var c counts
	r := StateReport{Positions: c.to("positions of a state", m.GetPositions()), Bytes: int64(c.to("bytes of a state", m.GetBytes()))}
	return r, c.err
}

func fromStateReport(r StateReport) *pb.StateReport {
	return &pb.StateReport{Positions: int64(r.Positions), Bytes: r.Bytes}
}

package sdk

import (
	"math"
	"unsafe"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
)

// A message says where a tensor lies within its slot's area; both ends see it as a slice of that area.

// toTensor finds a message's tensor in the area that it must lie in; an absent message is the zero Tensor.
func toTensor(m *pb.Tensor, area []byte) (Tensor, error) {
	if m == nil {
		return Tensor{}, nil
	}
	dtype, err := toDtype(m.GetDtype())
	if err != nil {
		return Tensor{}, err
	}
	if dtype.Size() == 0 {
		return Tensor{}, Errorf(CodeInvalid, "a tensor has the dtype %v, which has no size", dtype)
	}
	rows, width, offset := m.GetRows(), m.GetWidth(), m.GetOffset()
	size, ok := tensorBytes(rows, width, dtype)
	if !ok || offset < 0 || offset > int64(len(area)) || size > int64(len(area))-offset {
		return Tensor{}, Errorf(CodeInvalid, "tensor [%d, %d] %v at byte %d does not fit its slot's %d bytes: raise the region layout", rows, width, dtype, offset, len(area))
	}
	return Tensor{Dtype: dtype, Rows: int(rows), Width: int(width), Data: area[offset : offset+size : offset+size]}, nil
}

// fromTensor says where t lies in area. A tensor without rows is absent.
func fromTensor(t Tensor, area []byte) (*pb.Tensor, error) {
	if t.Rows == 0 && len(t.Data) == 0 {
		return nil, nil
	}
	size, ok := tensorBytes(int64(t.Rows), int64(t.Width), t.Dtype)
	if !ok || size != int64(len(t.Data)) {
		return nil, Errorf(CodeInvalid, "tensor [%d, %d] %v has %d bytes of data", t.Rows, t.Width, t.Dtype, len(t.Data))
	}
	offset, ok := offsetWithin(area, t.Data)
	if !ok {
		return nil, Errorf(CodeInvalid, "tensor [%d, %d] %v does not lie in its slot: write it there in place", t.Rows, t.Width, t.Dtype)
	}
	return &pb.Tensor{Dtype: pb.Dtype(t.Dtype), Rows: int64(t.Rows), Width: int64(t.Width), Offset: int64(offset)}, nil
}

// tensorBytes returns the size of a tensor, false when it has none or overflows.
func tensorBytes(rows, width int64, dtype Dtype) (int64, bool) {
	element := int64(dtype.Size())
	if rows < 1 || width < 1 || element == 0 || width > math.MaxInt64/element || rows > math.MaxInt64/(width*element) {
		return 0, false
	}
	return rows * width * element, true
}

// offsetWithin returns where part starts within area, false when it is not a part of it.
func offsetWithin(area, part []byte) (int, bool) {
	if len(area) == 0 || len(part) == 0 {
		return 0, false
	}
	start := uintptr(unsafe.Pointer(unsafe.SliceData(area)))
	at := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	if at < start || at-start > uintptr(len(area)) || uintptr(len(part)) > uintptr(len(area))-(at-start) {
		return 0, false
	}
	return int(at - start), true
}

func toStepResult(m *pb.StepResult, out []byte) (*StepResult, error) {
	hidden, err := toTensor(m.GetHidden(), out)
	if err != nil {
		return nil, err
	}
	r := &StepResult{ID: m.GetId(), Hidden: hidden, ComputeNanos: m.GetComputeNanos()}
	for _, s := range m.GetSeqs() {
		logits, err := toTensor(s.GetLogits(), out)
		if err != nil {
			return nil, err
		}
		result := SeqResult{
			Seq:     SeqID(s.GetSeq()),
			Token:   s.GetToken(),
			Logprob: s.GetLogprob(),
			Scores:  s.GetScores(),
			Logits:  logits,
		}
		for _, t := range s.GetTop() {
			result.Top = append(result.Top, TokenScore{Token: t.GetToken(), Logit: t.GetLogit(), Logprob: t.GetLogprob()})
		}
		r.Seqs = append(r.Seqs, result)
	}
	return r, nil
}

func fromStepResult(r *StepResult, out []byte) (*pb.StepResult, error) {
	hidden, err := fromTensor(r.Hidden, out)
	if err != nil {
		return nil, err
	}
	m := &pb.StepResult{Id: r.ID, Hidden: hidden, ComputeNanos: r.ComputeNanos}
	for _, s := range r.Seqs {
		logits, err := fromTensor(s.Logits, out)
		if err != nil {
			return nil, err
		}
		result := &pb.SeqResult{
			Seq:     uint64(s.Seq),
			Token:   s.Token,
			Logprob: s.Logprob,
			Scores:  s.Scores,
			Logits:  logits,
		}
		for _, t := range s.Top {
			result.Top = append(result.Top, &pb.TokenScore{Token: t.Token, Logit: t.Logit, Logprob: t.Logprob})
		}
		m.Seqs = append(m.Seqs, result)
	}
	return m, nil
}

func toStep(m *pb.Step, layout RegionLayout, mem []byte) (*Step, error) {
	if m.GetSlot() < 0 || m.GetSlot() >= int64(layout.Slots) {
		return nil, Errorf(CodeInvalid, "step %d names slot %d of %d", m.GetId(), m.GetSlot(), layout.Slots)
	}
	s := &Step{ID: m.GetId(), Slot: int(m.GetSlot())}
	s.Out = layout.Out(mem, s.Slot)
	seen := make(map[SeqID]bool, len(m.GetSeqs()))
	for _, seq := range m.GetSeqs() {
		one, err := toSeqStep(seq)
		if err != nil {
			return nil, err
		}
		if seen[one.Seq] {
			return nil, Errorf(CodeInvalid, "step %d names sequence %d twice", s.ID, one.Seq)
		}
		seen[one.Seq] = true
		s.Seqs = append(s.Seqs, one)
	}
	if len(s.Seqs) == 0 {
		return nil, Errorf(CodeInvalid, "step %d has no sequence", s.ID)
	}
	var err error
	s.Hidden, err = toTensor(m.GetHidden(), layout.In(mem, s.Slot))
	return s, err
}

func fromStep(s *Step, in []byte) (*pb.Step, error) {
	hidden, err := fromTensor(s.Hidden, in)
	if err != nil {
		return nil, err
	}
	m := &pb.Step{Id: s.ID, Slot: int64(s.Slot), Hidden: hidden}
	for i := range s.Seqs {
		m.Seqs = append(m.Seqs, fromSeqStep(&s.Seqs[i]))
	}
	return m, nil
}

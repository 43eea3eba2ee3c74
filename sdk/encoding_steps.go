package sdk

import (
	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// How orders and results go from host to host: the messages of the step stream, with masks and logits within them. What is
// read is checked as an executor checks it. An error is an *Error of CodeInvalid.

const (
	// MaxStepSequences bounds the sequences of an encoded step or result: in memory each takes many times its bytes.
	MaxStepSequences = 1 << 14
	// maxMessages bounds the messages within one, top tokens and biases included, for the same reason.
	maxMessages = 1 << 19
)

// AppendOp appends the encoding of an operation other than a step.
func AppendOp(b []byte, op Op) ([]byte, error) {
	m, err := fromOp(op)
	if err != nil {
		return b, err
	}
	return appendProto(b, "operation", m)
}

// DecodeOp reads what AppendOp wrote.
func DecodeOp(b []byte) (Op, error) {
	m, err := decodeBounded(b, "operation", &pb.Operation{})
	if err != nil {
		return nil, err
	}
	return toOp(m)
}

// AppendSteps appends the encoding of a step's sequences, masks included.
func AppendSteps(b []byte, seqs []SeqStep) ([]byte, error) {
	m := &pb.Step{Seqs: make([]*pb.SeqStep, len(seqs))}
	for i := range seqs {
		m.Seqs[i] = fromSeqStep(&seqs[i])
		m.Seqs[i].Allowed = seqs[i].Allowed
	}
	return appendProto(b, "step", m)
}

// DecodeSteps reads what AppendSteps wrote. A sequence named twice, or none at all, is an error.
func DecodeSteps(b []byte) ([]SeqStep, error) {
	m, err := decodeBounded(b, "step", &pb.Step{})
	if err != nil {
		return nil, err
	}
	return toSeqSteps(m.GetSeqs(), func(q *pb.SeqStep) ([]byte, error) { return q.GetAllowed(), nil })
}

// AppendResults appends the encoding of a step's answers, logits included.
func AppendResults(b []byte, results []SeqResult) ([]byte, error) {
	m := &pb.StepResult{Seqs: make([]*pb.SeqResult, len(results))}
	for i := range results {
		r := &results[i]
		m.Seqs[i] = fromSeqResult(r)
		if l := r.Logits; len(l.Data) > 0 {
			m.Seqs[i].Logits = &pb.Tensor{Dtype: pb.Dtype(l.Dtype), Rows: int64(l.Rows), Width: int64(l.Width), Data: l.Data}
		}
	}
	return appendProto(b, "result", m)
}

// DecodeResults reads what AppendResults wrote.
func DecodeResults(b []byte) ([]SeqResult, error) {
	m, err := decodeBounded(b, "result", &pb.StepResult{})
	if err != nil {
		return nil, err
	}
	results := make([]SeqResult, len(m.GetSeqs()))
	for i, s := range m.GetSeqs() {
		logits, err := toInlineTensor(s.GetLogits())
		if err != nil {
			return nil, err
		}
		results[i] = toSeqResult(s, logits)
	}
	return results, nil
}

// toInlineTensor reads a tensor whose bytes are in the message.
func toInlineTensor(m *pb.Tensor) (Tensor, error) {
	if m == nil {
		return Tensor{}, nil
	}
	dtype, err := toDtype(m.GetDtype())
	if err != nil {
		return Tensor{}, err
	}
	if size, ok := tensorBytes(m.GetRows(), m.GetWidth(), dtype); !ok || size != int64(len(m.GetData())) {
		return Tensor{}, Errorf(CodeInvalid, "tensor [%d, %d] %v has %d bytes of data", m.GetRows(), m.GetWidth(), dtype, len(m.GetData()))
	}
	return Tensor{Dtype: dtype, Rows: int(m.GetRows()), Width: int(m.GetWidth()), Data: m.GetData()}, nil
}

func appendProto(b []byte, what string, m proto.Message) ([]byte, error) {
	out, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, m)
	if err != nil {
		return b, Errorf(CodeInvalid, "encode a %s: %v", what, err)
	}
	return out, nil
}

// decodeBounded reads a message into m whose parts are counted before memory is taken for them.
func decodeBounded[M proto.Message](b []byte, what string, m M) (M, error) {
	left := maxMessages
	if !countMessages(b, m.ProtoReflect().Descriptor(), &left) {
		return m, Errorf(CodeInvalid, "a %s has more than %d sequences, or %d parts, or is broken", what, MaxStepSequences, maxMessages)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return m, Errorf(CodeInvalid, "decode a %s: %v", what, err)
	}
	return m, nil
}

// countMessages takes the messages within one of the type d off left; false where there are too many or b is no message.
func countMessages(b []byte, d protoreflect.MessageDescriptor, left *int) bool {
	direct := 0
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return false
		}
		b = b[n:]
		field := d.Fields().ByNumber(number)
		if kind != protowire.BytesType || field == nil || field.Kind() != protoreflect.MessageKind {
			if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
				return false
			}
			b = b[n:]
			continue
		}
		inner, n := protowire.ConsumeBytes(b)
		if n < 0 {
			return false
		}
		b = b[n:]
		if *left--; *left < 0 || !countMessages(inner, field.Message(), left) {
			return false
		}
		if direct++; field.IsList() && direct > MaxStepSequences && field.Message().FullName().Name() != "TokenScore" {
			return false
		}
	}
	return true
}

package sdk

import (
	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/proto"
)

// What hosts tell each other of their executors is encoded as the contract encodes it, by the messages of
// proto/executor.proto, and read with the same distrust as an executor's answers. An error is an *Error of CodeInvalid.

// MaxEncoding bounds the bytes of one encoded value, and so what reading it can cost: an empty layer of two bytes becomes
// some hundred. A profile of a thousand layers takes 40 KiB.
const MaxEncoding = 64 << 10

// MarshalBinary is encoding.BinaryMarshaler's.
func (d *Description) MarshalBinary() ([]byte, error) {
	return encode("description", fromDescription(d))
}

// UnmarshalBinary is encoding.BinaryUnmarshaler's.
func (d *Description) UnmarshalBinary(b []byte) error {
	return decode("description", b, d, toDescription)
}

// MarshalBinary is encoding.BinaryMarshaler's.
func (d *Device) MarshalBinary() ([]byte, error) { return encode("device", fromDevice(d)) }

// UnmarshalBinary is encoding.BinaryUnmarshaler's.
func (d *Device) UnmarshalBinary(b []byte) error { return decode("device", b, d, toDevice) }

// MarshalBinary is encoding.BinaryMarshaler's.
func (f *Family) MarshalBinary() ([]byte, error) { return encode("family", fromFamily(f)) }

// UnmarshalBinary is encoding.BinaryUnmarshaler's.
func (f *Family) UnmarshalBinary(b []byte) error {
	return decode("family", b, f, func(m *pb.Family) (*Family, error) { return toFamily(m), nil })
}

// MarshalBinary is encoding.BinaryMarshaler's.
func (p *ModelProfile) MarshalBinary() ([]byte, error) { return encode("profile", fromProfile(p)) }

// UnmarshalBinary is encoding.BinaryUnmarshaler's.
func (p *ModelProfile) UnmarshalBinary(b []byte) error { return decode("profile", b, p, toProfile) }

// MarshalBinary is encoding.BinaryMarshaler's.
func (p *LoadProgress) MarshalBinary() ([]byte, error) {
	return encode("load progress", fromProgress(*p))
}

// UnmarshalBinary is encoding.BinaryUnmarshaler's.
func (p *LoadProgress) UnmarshalBinary(b []byte) error {
	return decode("load progress", b, p, func(m *pb.LoadProgress) (*LoadProgress, error) {
		v := toProgress(m)
		return &v, nil
	})
}

// MarshalBinary is encoding.BinaryMarshaler's.
func (r *LoadReport) MarshalBinary() ([]byte, error) { return encode("load report", fromReport(r)) }

// UnmarshalBinary is encoding.BinaryUnmarshaler's.
func (r *LoadReport) UnmarshalBinary(b []byte) error { return decode("load report", b, r, toReport) }

// MarshalBinary is encoding.BinaryMarshaler's.
func (e *Error) MarshalBinary() ([]byte, error) { return encode("error", fromError(e)) }

// UnmarshalBinary is encoding.BinaryUnmarshaler's. A code that this version does not know becomes CodeInternal.
func (e *Error) UnmarshalBinary(b []byte) error {
	return decode("error", b, e, func(m *pb.Error) (*Error, error) { return toError(m), nil })
}

func encode(what string, m proto.Message) ([]byte, error) {
	if err := checkEncoding(what, proto.Size(m)); err != nil {
		return nil, err
	}
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, Errorf(CodeInvalid, "encode a %s: %v", what, err)
	}
	return b, nil
}

// decode sets into to what b encodes, and leaves it alone where that is nothing.
func decode[T any, M proto.Message](what string, b []byte, into *T, to func(M) (*T, error)) error {
	if err := checkEncoding(what, len(b)); err != nil {
		return err
	}
	var none M
	m := none.ProtoReflect().New().Interface().(M)
	if err := proto.Unmarshal(b, m); err != nil {
		return Errorf(CodeInvalid, "decode a %s: %v", what, err)
	}
	v, err := to(m)
	if err == nil {
		*into = *v
	}
	return err
}

func checkEncoding(what string, bytes int) error {
	if bytes > MaxEncoding {
		return Errorf(CodeInvalid, "a %s of %d bytes passes the limit of %d", what, bytes, MaxEncoding)
	}
	return nil
}

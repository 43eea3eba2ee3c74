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

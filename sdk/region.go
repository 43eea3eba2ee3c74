package sdk

import (
	"fmt"
	"math"
)

// RegionLayout divides the shared-memory region into slots. A slot is an input, an output and a mask area, in this order.
type RegionLayout struct {
	Slots     int // steps in flight at most
	InBytes   int // input area of one slot: hidden rows from the stage before
	OutBytes  int // output area of one slot: hidden rows for the next stage, or logits
	MaskBytes int // mask area of one slot: the allowed tokens of a step's sequences, one mask after the other
}

// Size returns the bytes of the whole region.
func (l RegionLayout) Size() int { return l.Slots * l.slotBytes() }

func (l RegionLayout) slotBytes() int { return l.InBytes + l.OutBytes + l.MaskBytes }

// Validate reports a layout that can't be mapped.
func (l RegionLayout) Validate() error {
	if l.Slots < 1 || l.InBytes < 0 || l.OutBytes < 0 || l.MaskBytes < 0 {
		return fmt.Errorf("region layout %+v: want at least one slot and no negative area", l)
	}
	if l.InBytes > math.MaxInt-l.OutBytes || l.InBytes+l.OutBytes > math.MaxInt-l.MaskBytes || l.slotBytes() > math.MaxInt/l.Slots {
		return fmt.Errorf("region layout %+v: its size overflows", l)
	}
	return nil
}

// In returns slot i's input area within the mapped region mem.
func (l RegionLayout) In(mem []byte, i int) []byte { return l.area(mem, i, 0, l.InBytes) }

// Out returns slot i's output area within the mapped region mem.
func (l RegionLayout) Out(mem []byte, i int) []byte { return l.area(mem, i, l.InBytes, l.OutBytes) }

// Masks returns slot i's mask area within the mapped region mem.
func (l RegionLayout) Masks(mem []byte, i int) []byte {
	return l.area(mem, i, l.InBytes+l.OutBytes, l.MaskBytes)
}

func (l RegionLayout) area(mem []byte, slot, offset, bytes int) []byte {
	at := slot*l.slotBytes() + offset
	return mem[at : at+bytes : at+bytes]
}

package sdk

import (
	"fmt"
	"math"
)

// RegionLayout divides the shared-memory region into slots. A slot is an input area followed by an output area.
type RegionLayout struct {
	Slots    int // steps in flight at most
	InBytes  int // input area of one slot: hidden rows from the stage before
	OutBytes int // output area of one slot: hidden rows for the next stage, or logits
}

// Size returns the bytes of the whole region.
func (l RegionLayout) Size() int { return l.Slots * (l.InBytes + l.OutBytes) }

// Validate reports a layout that can't be mapped.
func (l RegionLayout) Validate() error {
	if l.Slots < 1 || l.InBytes < 0 || l.OutBytes < 0 {
		return fmt.Errorf("region layout %+v: want at least one slot and no negative area", l)
	}
	if l.InBytes > math.MaxInt-l.OutBytes || l.InBytes+l.OutBytes > math.MaxInt/l.Slots {
		return fmt.Errorf("region layout %+v: its size overflows", l)
	}
	return nil
}

// In returns slot i's input area within the mapped region mem.
func (l RegionLayout) In(mem []byte, i int) []byte {
	at := i * (l.InBytes + l.OutBytes)
	return mem[at : at+l.InBytes : at+l.InBytes]
}

// Out returns slot i's output area within the mapped region mem.
func (l RegionLayout) Out(mem []byte, i int) []byte {
	at := i*(l.InBytes+l.OutBytes) + l.InBytes
	return mem[at : at+l.OutBytes : at+l.OutBytes]
}

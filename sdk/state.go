package sdk

import "fmt"

// StateKind is how one state of a layer is laid out.
type StateKind int

const (
	StateKV        StateKind = 1 + iota // keys [Rows, KeyWidth], then values [Rows, ValueWidth], of positions from First on
	StateLatent                         // [Rows, KeyWidth] of positions from First on: a head's values lie within its keys
	StateRecurrent                      // a matrix [Rows, KeyWidth] that stands for all positions
)

func (k StateKind) String() string {
	switch k {
	case StateKV:
		return "kv"
	case StateLatent:
		return "latent"
	case StateRecurrent:
		return "recurrent"
	}
	return fmt.Sprintf("kind(%d)", int(k))
}

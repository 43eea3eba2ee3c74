package securelink

import "fmt"

// RefusalCode is why a node that holds the secret is refused all the same.
type RefusalCode uint8

// The codes; their numbers are on the wire. A code that this version does not know is passed on as it is.
const (
	RefusedBusy    RefusalCode = 1 // at capacity: another coordinator has it, or no room for more
	RefusedVersion RefusalCode = 2 // the program's version differs
	RefusedCluster RefusalCode = 3 // the cluster's name differs
	RefusedRole    RefusalCode = 4 // that role has no business here
	RefusedOther   RefusalCode = 5 // the text says what
)

func (c RefusalCode) String() string {
	switch c {
	case RefusedBusy:
		return "at capacity"
	case RefusedVersion:
		return "program version differs"
	case RefusedCluster:
		return "cluster name differs"
	case RefusedRole:
		return "role not allowed"
	case RefusedOther:
		return "refused"
	}
	return fmt.Sprintf("refusal %d", uint8(c))
}

// MaxRefusalText is the longest text of a refusal, in bytes. A longer one is cut.
const MaxRefusalText = 252

// Refusal is a verdict other than "accept".
type Refusal struct {
	Code RefusalCode
	Text string // for people: what was wanted, what was got, what to change
}

func (r Refusal) String() string {
	if r.Text == "" {
		return r.Code.String()
	}
	return r.Code.String() + ": " + r.Text
}

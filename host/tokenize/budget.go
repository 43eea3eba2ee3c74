package tokenize

import (
	"fmt"
	"time"
)

// limits bound the time that regular expressions may take.
type limits struct {
	now     func() time.Time
	search  time.Duration // for finding one match
	text    time.Duration // for all matches in one text
	perByte time.Duration // added to text for each byte of it
}

// defaultLimits are far above what real tokenizers need: those split several MB a second, and the time per byte alone
// allows half a MB a second. What runs into a limit backtracks without end.
func defaultLimits() limits {
	return limits{now: time.Now, search: 2 * time.Second, text: 5 * time.Second, perByte: 2 * time.Microsecond}
}

// budget is what is left of the limits while one text is encoded.
type budget struct {
	now      func() time.Time
	deadline time.Time
}

func (l limits) start(textBytes int) budget {
	return budget{now: l.now, deadline: l.now().Add(l.text + time.Duration(textBytes)*l.perByte)}
}

func (b *budget) spent() bool { return b.now().After(b.deadline) }

func tooSlow(pattern string, cause error) error {
	if cause == nil {
		return fmt.Errorf("%w: pattern %q", ErrTooSlow, pattern)
	}
	return fmt.Errorf("%w: pattern %q: %v", ErrTooSlow, pattern, cause)
}

package executor

import (
	"errors"
	"testing"
	"time"
)

func TestProgress(t *testing.T) {
	begin := time.Unix(1000, 0)
	p := Progress{Limit: 10 * time.Second}
	for _, c := range []struct {
		at      int // seconds
		steps   uint64
		queued  int
		stalled int // seconds, 0 for none
	}{
		{0, 0, 0, 0},   // idle
		{100, 0, 0, 0}, // idle for long
		{101, 0, 2, 0}, // work came
		{109, 0, 2, 0},
		{111, 1, 1, 0}, // a step finished
		{120, 1, 1, 0},
		{121, 1, 1, 0}, // at the limit
		{122, 1, 1, 11},
		{130, 1, 3, 19}, // more work makes no progress
		{131, 2, 2, 0},  // it moves again
		{150, 2, 0, 0},  // the queue emptied by other means
		{151, 2, 1, 0},
		{161, 2, 1, 11}, // counted from the last sight of an empty queue
	} {
		err := p.Observe(begin.Add(time.Duration(c.at)*time.Second), c.steps, c.queued)
		stalled, ok := errors.AsType[*StalledError](err)
		if (c.stalled != 0) != ok {
			t.Fatalf("at %d s: error %v, want stalled for %d s", c.at, err, c.stalled)
		}
		if ok && stalled.For != time.Duration(c.stalled)*time.Second {
			t.Errorf("at %d s: stalled for %v, want %d s", c.at, stalled.For, c.stalled)
		}
	}
}

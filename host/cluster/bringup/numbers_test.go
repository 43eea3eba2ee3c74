package bringup

import (
	"testing"
	"time"
)

func TestBusyFraction(t *testing.T) {
	start := time.Unix(1, 0)
	var n numbers
	for _, step := range []struct {
		after, busy time.Duration
		want        float64
	}{
		{0, 3 * time.Second, 0}, // nothing to compare with
		{4 * time.Second, 4 * time.Second, 0.25},
		{6 * time.Second, 4 * time.Second, 0},
		{7 * time.Second, 6 * time.Second, 1}, // counted when a step ends
		{7 * time.Second, 7 * time.Second, 0}, // no time has passed
	} {
		n = n.next(start.Add(step.after), step.busy, 1, 2)
		if n.fraction != step.want || n.sent != 1 || n.received != 2 {
			t.Errorf("after %v: %+v, want %v", step.after, n, step.want)
		}
	}
}

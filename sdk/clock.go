package sdk

import "golang.org/x/sys/unix"

// monotonicNanos is a clock that all processes of the machine share; 0 where there is none.
func monotonicNanos() int64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return t.Nano()
}

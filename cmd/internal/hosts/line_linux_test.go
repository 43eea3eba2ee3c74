package hosts

import (
	"math/rand/v2"
	"testing"
	"time"
)

func TestLine(t *testing.T) {
	const ms = time.Millisecond
	start := time.Unix(0, 0)
	type sent struct {
		at, arrives time.Duration // arrives < 0: lost
		size        int
	}
	for name, tc := range map[string]struct {
		quality Quality
		sent    []sent
	}{
		"at once":              {Quality{}, []sent{{0, 0, 1500}, {0, 0, 1500}, {5 * ms, 5 * ms, 1500}}},
		"delay":                {Quality{Delay: 20 * ms}, []sent{{0, 20 * ms, 1500}, {ms, 21 * ms, 1500}}},
		"rate":                 {Quality{Rate: 1000}, []sent{{0, 10 * ms, 10}, {0, 30 * ms, 20}, {100 * ms, 110 * ms, 10}}},
		"delay after the rate": {Quality{Delay: 5 * ms, Rate: 1000}, []sent{{0, 15 * ms, 10}, {0, 25 * ms, 10}}},
		"all lost":             {Quality{Loss: 1}, []sent{{0, -1, 1500}, {0, -1, 1500}}},
		"cut":                  {Quality{Cut: true, Delay: ms}, []sent{{0, -1, 1500}}},
	} {
		t.Run(name, func(t *testing.T) {
			l := line{quality: tc.quality, random: rand.New(rand.NewPCG(1, 1))}
			for i, s := range tc.sent {
				arrival, ok := l.send(start.Add(s.at), s.size)
				if got := arrival.Sub(start); ok != (s.arrives >= 0) || ok && got != s.arrives {
					t.Errorf("packet %d: %v %v, want %v", i, got, ok, s.arrives)
				}
			}
		})
	}
}

func TestLineJitterKeepsOrder(t *testing.T) {
	const delay, jitter = 10 * time.Millisecond, 5 * time.Millisecond
	l := line{quality: Quality{Delay: delay, Jitter: jitter}, random: rand.New(rand.NewPCG(1, 1))}
	now, last := time.Unix(0, 0), time.Time{}
	varied := map[time.Duration]bool{}
	for range 1000 {
		now = now.Add(100 * time.Microsecond)
		arrival, ok := l.send(now, 100)
		took := arrival.Sub(now)
		if !ok || arrival.Before(last) || took < delay || took > delay+jitter {
			t.Fatalf("%v after %v: %v", arrival, last, took)
		}
		last, varied[took] = arrival, true
	}
	if len(varied) < 10 {
		t.Errorf("only %d different delays", len(varied))
	}
}

func TestLineLosesItsShare(t *testing.T) {
	const n = 10000
	l := line{quality: Quality{Loss: 0.1}, random: rand.New(rand.NewPCG(1, 1))}
	lost := 0
	for range n {
		if _, ok := l.send(time.Unix(0, 0), 100); !ok {
			lost++
		}
	}
	if lost < n*8/100 || lost > n*12/100 {
		t.Errorf("%d of %d lost, want a tenth", lost, n)
	}
}

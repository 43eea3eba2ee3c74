package pipeline

import (
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// BenchmarkDecodeStep measures what the runtime adds to a decode step: "bare" is the toy executor's own round trip,
// the others the whole way through one and two stages.
func BenchmarkDecodeStep(b *testing.B) {
	b.Run("bare", func(b *testing.B) {
		l := &toyLauncher{}
		p := startToy(b, toyConfig(b, 1, l))
		defer closeToy(b, p)
		if err := p.Reserve(b.Context(), sdk.Reservation{Seq: 1}); err != nil {
			b.Fatal(err)
		}
		e := l.executor(0)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			pending, err := e.Send(&sdk.Step{ID: uint64(i), Seqs: []sdk.SeqStep{{Seq: 1, Pos: i, Rows: 1, Tokens: []int32{1}, Want: sdk.WantToken}}})
			if err != nil {
				b.Fatal(err)
			}
			if _, err := pending.Wait(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("bare over the contract", func(b *testing.B) {
		l := &servedLauncher{}
		cfg := toyConfig(b, 1, &toyLauncher{})
		cfg.Launcher = l
		p := startToy(b, cfg)
		if err := p.Reserve(b.Context(), sdk.Reservation{Seq: 1}); err != nil {
			b.Fatal(err)
		}
		defer closeToy(b, p)
		steps := p.running[0].monitor.cfg.steps
		for i := 0; b.Loop(); i++ {
			pending, err := steps.Send(&sdk.Step{ID: uint64(i + 100), Seqs: []sdk.SeqStep{{Seq: 1, Pos: i, Rows: 1, Tokens: []int32{1}, Want: sdk.WantToken}}})
			if err != nil {
				b.Fatal(err)
			}
			if _, err := pending.Wait(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
	for _, c := range []struct {
		name     string
		stages   int
		launcher Launcher
	}{
		{"one stage", 1, &toyLauncher{}}, {"two stages", 2, &toyLauncher{}},
		{"one stage over the contract", 1, &servedLauncher{}}, {"two stages over the contract", 2, &servedLauncher{}},
	} {
		b.Run(c.name, func(b *testing.B) {
			cfg := toyConfig(b, c.stages, &toyLauncher{})
			cfg.Launcher = c.launcher
			p := startToy(b, cfg)
			defer closeToy(b, p)
			if err := p.Reserve(b.Context(), sdk.Reservation{Seq: 1}); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := p.Step(b.Context(), []sdk.SeqStep{{Seq: 1, Pos: i, Rows: 1, Tokens: []int32{1}, Want: sdk.WantToken}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// spin makes every step of a toy compute for d.
func spin(l *toyLauncher, d time.Duration) {
	l.prepare = func(e *toyExecutor) {
		e.tamper = func(r *sdk.StepResult) {
			begin := time.Now()
			for time.Since(begin) < d {
			}
			r.ComputeNanos = time.Since(begin).Nanoseconds()
		}
	}
}

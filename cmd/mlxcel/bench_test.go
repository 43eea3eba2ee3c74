package main

import (
	"slices"
	"testing"
)

// BenchmarkGenerate runs the real model alternately on one and on two stages of one thread each, as a whole program.
// Machines are noisy: the ratio of the two medians is what counts.
func BenchmarkGenerate(b *testing.B) {
	run := func(args ...string) timings {
		args = append([]string{"-m", smolLM2, "-p", "Write a long story about a lighthouse.", "-n", "200", "--ignore-eos", "--threads", "1"}, args...)
		return answerOf(b, args...).Timings
	}
	var one, two, load, prompt []float64
	for b.Loop() {
		t := run()
		one, load, prompt = append(one, t.Decode), append(load, t.Load), append(prompt, t.Prompt)
		two = append(two, run("--pp-size", "2").Decode)
	}
	b.ReportMetric(median(one), "tok/s-1-stage")
	b.ReportMetric(median(two), "tok/s-2-stages")
	b.ReportMetric(median(two)/median(one), "ratio-2-to-1")
	b.ReportMetric(median(prompt), "prompt-tok/s")
	b.ReportMetric(median(load), "load-s")
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

#!/usr/bin/env bash
# bench.sh: the figures that the documentation promises, each with its rival in the same run. Nothing else should run.
set -euo pipefail

echo "== the whole program: SmolLM2, one thread per stage, one stage against two"
(cd cmd && go test ./mlxcel -run '^$' -bench BenchmarkGenerate -benchtime "${BENCH_RUNS:-7}x")
echo "== a step's round trip to an executor process"
(cd sdk && go test ./... -run '^$' -bench BenchmarkStepRoundTrip)
echo "== what the pipeline adds to a step"
(cd host && go test ./pipeline -run '^$' -bench .)
echo "== kernels and graph overhead"
(cd mlxshared && go test ./kernels/cpu ./mlx -run '^$' -bench .)
echo "== tokenizer"
(cd host && go test ./tokenize -run '^$' -bench .)

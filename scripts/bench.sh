#!/usr/bin/env bash
# bench.sh: the figures that the documentation promises, each with its rival in the same run. Nothing else should run.
set -euo pipefail

echo "== the whole program: SmolLM2, one thread per stage, one stage against two"
(cd cmd && go test ./mlxcel -run '^$' -bench BenchmarkGenerate -benchtime "${BENCH_RUNS:-7}x")
echo "== servers: SmolLM2, one stage, two stages and llama.cpp, at 8 streams and at one"
scripts/bench/serve.sh
echo "== a step's round trip to an executor process"
(cd sdk && go test ./... -run '^$' -bench BenchmarkStepRoundTrip)
echo "== what the pipeline adds to a step"
(cd host && go test ./pipeline -run '^$' -bench .)
echo "== secured links beside plain TCP and TLS, one way"
(cd host && go test ./securelink -run '^$' -bench OneWay)
echo "== bring-up of three peers, without weights; from a cut connection to a cluster that is down"
(cd host && go test ./cluster/bringup -run '^$' -bench .)
echo "== kernels and graph overhead"
(cd mlxshared && go test ./kernels/cpu ./mlx -run '^$' -bench .)
echo "== tokenizer"
(cd host && go test ./tokenize -run '^$' -bench .)

#!/usr/bin/env bash
# fuzz.sh MODULE...: runs each native fuzz target of each module for FUZZTIME, one after another.
set -euo pipefail
time=${FUZZTIME:-10s}
for module in "$@"; do
  grep -rlE '^func Fuzz' --include='*_test.go' "$module" | sort | while read -r file; do
    grep -oE '^func Fuzz[A-Za-z0-9_]+' "$file" | sed 's/^func //' | while read -r target; do
      echo "fuzz $(dirname "$file") $target"
      go test "./$(dirname "$file")" -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 1s </dev/null
    done
  done
done

#!/usr/bin/env bash
# run.sh [FLAG...]: builds the soak program and runs it against bin/mlxcel-server; -duration 10m for the long run.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$root/.cache"
(cd "$root/scripts/soak" && GOTOOLCHAIN=go1.27.3 GOWORK=off go build -o "$root/.cache/soak" .)
cd "$root"
exec .cache/soak "$@"

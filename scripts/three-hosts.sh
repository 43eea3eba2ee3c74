#!/usr/bin/env bash
# three-hosts.sh HOSTS: serves a real model over the hosts that the file HOSTS names, one stage each, and compares the tokens with those of
# one process on this machine. docs/validation.md describes the file. MODEL is this machine's copy of the model.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: MODEL=folder $0 HOSTS" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
model=${MODEL:-$root/models/smollm2-135m-instruct}
tokens=${TOKENS:-64}
patience=${PATIENCE:-300} # seconds for a peer to come up
prompts=(
	"The capital of France is"
	"Write a haiku about a pipeline."
	"Numbers: 0 1 2 3 42 1234567. Go on:"
	"def fibonacci(n):"
	"Erkläre in zwei Sätzen, was ein Netzwerk ist."
)

work=$(mktemp -d)
peers=() # process ids of the ssh commands
inputs=() # process ids of what keeps each peer running: the peer ends when its input does

finish() {
	for pid in ${inputs[@]+"${inputs[@]}"}; do kill "$pid" || true; done
	for pid in ${peers[@]+"${peers[@]}"}; do wait "$pid" || true; done
	if [ "${passed:-no}" = yes ]; then rm -rf "$work"; else echo "the peers' logs are in $work" >&2; fi
}
trap finish EXIT

"$root/bin/mlxcel" cluster secret new "$work/secret" >/dev/null

# Each line: what ssh connects to, the address that the others reach, the folder of mlxcel-server there, the model's folder there.
stages=0
addresses=()
while read -r destination address programs folder; do
	case $destination in ''|'#'*) continue ;; esac
	log=$work/peer-$stages.log
	mkfifo "$work/input-$stages"
	# The peer's secret comes first on the input. The peer runs until the input ends, also where this machine goes away.
	ssh -o BatchMode=yes "$destination" "umask 077; dir=\$(mktemp -d) && cd \"\$dir\" && head -n 1 > secret || exit 1
		'$programs/mlxcel-server' -m '$folder' --pp-peer --cluster-secret-file secret --cluster-control-addr '$address' < /dev/null &
		while read -r _; do :; done
		kill -TERM \$!; wait \$!; cd /; rm -rf \"\$dir\"" < "$work/input-$stages" > "$log" 2>&1 &
	peers+=($!)
	{ cat "$work/secret"; exec sleep 1000000; } > "$work/input-$stages" &
	inputs+=($!)
	addresses+=("$address")
	stages=$((stages + 1))
done < "$1"
[ "$stages" -ge 2 ] || { echo "$1 names $stages hosts, want at least 2 (the tier is about 3)" >&2; exit 2; }

for i in "${!addresses[@]}"; do
	for ((waited = 0; ; waited++)); do
		grep -q "waiting for a coordinator" "$work/peer-$i.log" && break
		if ! kill -0 "${peers[$i]}" 2>/dev/null || [ "$waited" -ge "$patience" ]; then
			echo "the peer at ${addresses[$i]} does not come up:" >&2
			cat "$work/peer-$i.log" >&2
			exit 1
		fi
		sleep 1
	done
done

# The plan that --pp-auto would make.
(
	cd "$work"
	"$root/bin/mlxcel-server" -m "$model" --pp-auto "$stages" --cluster-peers "$(IFS=,; echo "${addresses[*]}")" \
		--host 0.0.0.0 --cluster-secret-file secret --cluster-config-out cluster.toml --dry-run
)

ids() { tr -d ' \n' | grep -o '"token_ids":\[[0-9,]*\]'; }

answer() { # PROMPT FLAG...
	local prompt=$1
	shift
	"$root/bin/mlxcel" generate -m "$model" -p "$prompt" -n "$tokens" --ignore-eos --json "$@" | ids
}

for prompt in "${prompts[@]}"; do
	alone=$(answer "$prompt")
	split=$(answer "$prompt" --distributed-config "$work/cluster.toml" --node-id coordinator --cluster-secret-file "$work/secret")
	if [ "$alone" != "$split" ]; then
		printf 'DIFFERS  %s\n  one process: %s\n  %d hosts:     %s\n' "$prompt" "$alone" "$stages" "$split" >&2
		exit 1
	fi
	printf 'ok       %s tokens over %d hosts equal one process: %s\n' "$tokens" "$stages" "$prompt"
done
passed=yes

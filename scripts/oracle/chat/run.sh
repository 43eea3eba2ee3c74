#!/bin/sh
# Renders real chat templates with the Python original and leaves the texts in
# .cache/oracle/chat/goldens for the test in host/chat (MLXCEL_CHAT_ORACLE).
# Fetches and renders only what is not there yet. Needs Python 3.9 or later
# with pip. The last line printed is the folder.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
cache=$root/.cache/oracle/chat
cases=$root/host/chat/testdata/jinja2.json
python=${PYTHON:-python3}

stamp=$(cat "$here"/*.py "$here/requirements.txt" "$here/run.sh" "$cases" | cksum | tr ' ' -)
if [ "$(cat "$cache/stamp" 2>/dev/null)" != "$stamp" ]; then
	rm -rf "$cache"
	mkdir -p "$cache"
	"$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target "$cache/site" \
		--only-binary :all: --require-hashes -r "$here/requirements.txt"
	"$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target "$cache/site" \
		--only-binary :all: markupsafe==3.0.3
	PYTHONPATH=$cache/site "$python" -B "$here/goldens.py" "$cases" "$cache/goldens"
	echo "$stamp" >"$cache/stamp"
fi
echo "$cache/goldens"

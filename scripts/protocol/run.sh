#!/bin/sh
# Fetches what link.py needs into .cache/oracle/protocol/site, once, for the tests in host/securelink that talk to it.
# Needs Python 3.10 or later with pip. The last line printed is the folder, for PYTHONPATH.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
cache=$root/.cache/oracle/protocol
python=${PYTHON:-python3}

stamp=$("$python" -c 'import sys; print(sys.version_info[:2])' | cat - "$here/requirements.txt" | cksum | tr ' ' -)
if [ "$(cat "$cache/stamp" 2>/dev/null)" != "$stamp" ]; then
	rm -rf "$cache"
	mkdir -p "$cache"
	"$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$cache/site" \
		--only-binary :all: --require-hashes -r "$here/requirements.txt"
	echo "$stamp" >"$cache/stamp"
fi
echo "$cache/site"

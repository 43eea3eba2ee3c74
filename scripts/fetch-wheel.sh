#!/usr/bin/env bash
# fetch-wheel.sh REQUIREMENTS FOLDER: unpacks the one pinned wheel that REQUIREMENTS names into FOLDER.
# pip checks the wheel against the hashes in the file; the folder appears only when it is complete.
set -euo pipefail
requirements=$1 folder=$2
mkdir -p "$(dirname "$folder")"
tmp=$(mktemp -d "$folder.partial.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all: \
  --require-hashes --target "$tmp" -r "$requirements"
chmod 755 "$tmp"
rm -rf "$folder"
mv "$tmp" "$folder"

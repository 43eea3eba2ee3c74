#!/usr/bin/env bash
# lint.sh MODULE...: gofmt, go vet and staticcheck over each module of the workspace.
set -euo pipefail
staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
unformatted=$(gofmt -l "$@")
if [ -n "$unformatted" ]; then
  printf 'not gofmt-ed:\n%s\n' "$unformatted" >&2
  exit 1
fi
mkdir -p .tools
GOBIN=$PWD/.tools GOWORK=off go install "$staticcheck"
for module in "$@"; do
  echo "lint $module"
  (cd "$module" && go vet ./... && "$OLDPWD/.tools/staticcheck" ./...)
done

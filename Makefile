# `make serve` and `make test` do all the set-up that they need.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
CMAKE = $(BIN)/cmake -S native -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
CLANG_FORMAT := $(BIN)/clang-format --style=file:native/.clang-format
CFILES = $(shell git ls-files '*.c' '*.h')
NATIVE := $(shell find native -type f)

PORT ?= 8000
MODEL ?=
# Tests that neither load a real model nor start a server or a worker.
FAST := tests/test_layers.py tests/server/test_config.py tests/server/test_meter.py \
	$(addprefix tests/engine/,base/test_config.py base/test_messages.py \
	client/test_totals.py client/test_watchdog.py \
	memory/test_capacity.py memory/test_experts.py memory/test_kv_blocks.py \
	text/test_detokenizer.py text/test_dialect.py text/test_reply.py \
	worker/test_pace.py worker/test_scheduler.py worker/test_stops.py worker/test_transcript.py \
	files/formats/test_blocks.py files/formats/test_gguf.py \
	files/formats/test_safetensors.py files/formats/test_tiles.py)
ACCURACY := tests/engine/files/models
CLIENTS := build/clients

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help serve build test test-fast test-native test-python test-accuracy test-vocabularies bench bench-peers bench-experts records claims image soak test-page test-clients check format wheel clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# Programs that pip cannot install. They are the first prerequisites, so a missing one is named before
# anything is built.
need-%:
	@command -v $* >/dev/null || { echo "$* is missing; on Debian: apt-get install $(or $(package_$*),$*)" >&2; exit 1; }

package_llvm-mca-19 := llvm-19

need-root:
	@[ "$$(id -u)" = 0 ] || { echo "only root can do this: run make $(MAKECMDGOALS) as root" >&2; exit 1; }

# The engine is compiled by the editable install, and again after a change in native/.
$(VENV)/cflow: pyproject.toml $(NATIVE)
	@echo "Setting up $(VENV) and compiling the engine: a minute or two, once."
	python3 -m venv $(VENV)
	$(PIP) install -q --editable .
	@touch $@

# The tools of tests and checks; installing them builds cflow as well.
$(VENV)/tools: pyproject.toml
	@echo "Setting up $(VENV) with what tests and checks need: some minutes, once."
	python3 -m venv $(VENV)
	$(PIP) install -q --editable '.[test,dev]'
	@touch $@ $(VENV)/cflow

build: $(VENV)/cflow ## Set up the virtual environment and build the engine

serve: $(VENV)/cflow ## Serve MODEL (smollm2-135m) on 127.0.0.1:PORT (8000)
	$(BIN)/cflow serve $(MODEL) --port $(PORT)

test: $(VENV)/tools $(VENV)/cflow ## Run all tests: C under ASan and UBSan, then Python
	@failed=0; \
	$(MAKE) --no-print-directory test-native || failed=1; \
	$(MAKE) --no-print-directory test-python || failed=1; \
	exit $$failed

test-fast: $(VENV)/tools $(VENV)/cflow ## Run tests that need no model, server or worker: under a minute
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile $(FAST)

test-native: $(VENV)/tools
	$(CMAKE) -B build/sanitized -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG="-O1 -g" \
		-DCFLOW_SANITIZE=ON
	$(BIN)/cmake --build build/sanitized
	$(BIN)/ctest --test-dir build/sanitized --output-on-failure -j 2

# Two processes, each with whole files: many tests wait for something, and few use two cores.
test-python: $(VENV)/tools $(VENV)/cflow
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-accuracy: $(VENV)/tools $(VENV)/cflow ## Score the real models on every window of the text
	CFLOW_TEST_WINDOWS=all $(BIN)/pytest $(ACCURACY)

test-vocabularies: $(VENV)/tools $(VENV)/cflow ## Encode 10,000 random texts with every kind of tokenizer
	CFLOW_TEST_TEXTS=10000 $(BIN)/pytest -q -n 2 tests/engine/files/models/test_vocabulary_suite.py \
		tests/engine/files/models/test_random_texts.py

soak: $(VENV)/tools $(VENV)/cflow ## Mixed load for 30 minutes, with the worker killed every 3
	PYTHONPATH=tests $(BIN)/python -P -m e2e.soak $(FLAGS)

test-page: need-chromium $(VENV)/tools $(VENV)/cflow ## Drive the page with Chromium and take its pictures
	$(PIP) install -q --editable '.[test,dev,page]'
	CFLOW_SCREENSHOTS=docs/pictures $(BIN)/pytest tests/e2e/test_page.py

$(CLIENTS)/installed: pyproject.toml
	@echo "Setting up $(CLIENTS): some minutes, once."
	python3 -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install -q --upgrade 'pip>=25.1'
	$(CLIENTS)/bin/pip install -q --group clients
	@touch $@

# Exact versions: package-lock.json. No install scripts: what they would fetch is in the packages.
# uv, as pip tries old versions for minutes.
build/agents/installed: pyproject.toml
	python3 -m venv $(@D)
	$(@D)/bin/pip install -q uv
	$(@D)/bin/uv pip install -q --python $(@D)/bin/python --group agents
	@touch $@

build/aider/installed: build/agents/installed
	python3 -m venv $(@D)
	build/agents/bin/uv pip install -q --python $(@D)/bin/python --group aider
	@touch $@

build/npm/installed: tests/e2e/clients/package.json tests/e2e/clients/package-lock.json
	@mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund
	@touch $@

test-clients: need-npm $(VENV)/tools $(VENV)/cflow $(CLIENTS)/installed build/agents/installed build/aider/installed build/npm/installed ## Have clients, agents and load tools use the server
	$(BIN)/pytest tests/e2e/test_clients.py tests/e2e/test_agents.py

BENCH = PYTHONPATH=tests $(BIN)/python -P -m bench

build/bench/multiply: $(VENV)/tools tests/bench/multiply.c
	$(CMAKE) -B build/bench -DCMAKE_BUILD_TYPE=Release -DCFLOW_BENCH=ON
	$(BIN)/cmake --build build/bench --target multiply

bench: $(VENV)/tools $(VENV)/cflow build/bench/multiply ## Measure the benchmark table, 13 minutes, or only MODEL
	$(if $(MODEL),$(BIN)/cflow bench $(MODEL),$(BENCH).table $(FLAGS))

bench-peers: $(VENV)/tools $(VENV)/cflow build/bench/multiply ## Measure other engines beside cflow: they are compiled first
	$(BENCH).peers $(FLAGS)

records: need-valgrind need-llvm-mca-19 $(VENV)/tools ## Count what the hot kernels cost, without a clock: valgrind, llvm-19
	$(CMAKE) -B build/bench -DCMAKE_BUILD_TYPE=Release -DCFLOW_BENCH=ON
	$(BIN)/cmake --build build/bench --target tiles regions_avx2 regions_avx512vnni
	$(BENCH).records

bench-experts: need-root $(VENV)/cflow ## Measure models larger than their memory: 22 GB of files, root
	$(BIN)/python -P tests/bench/expert_tier.py $(FLAGS)

claims: $(VENV)/tools $(VENV)/cflow ## Measure the published claims here and write docs/claims.md
	$(CMAKE) -B build/bench -DCMAKE_BUILD_TYPE=Release -DCFLOW_BENCH=ON
	$(BIN)/cmake --build build/bench
	$(BIN)/cflow lab claims $(FLAGS)

image: need-root need-debootstrap need-buildah need-podman need-runc $(VENV)/tools $(VENV)/cflow ## Build the container image without a Docker engine and try it: root, apt
	docker/build-here.sh
	$(BIN)/pytest tests/e2e/test_image.py

build/types:
	mkdir -p $@/cflow
	ln -sfn ../../../server $@/cflow/server
	ln -sfn ../../../engine $@/cflow/engine

check: $(VENV)/tools build/types ## Lint, type-check, and build the C code with -Werror
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CFILES)
	$(CMAKE) -B build/strict -DCMAKE_BUILD_TYPE=Release -DCFLOW_WERROR=ON
	$(BIN)/cmake --build build/strict --target cflow

format: $(VENV)/tools ## Rewrite files in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CLANG_FORMAT) -i $(CFILES)

wheel: $(VENV)/cflow ## Build a wheel into build/dist
	$(PIP) wheel -q --no-deps -w build/dist .

clean: ## Remove everything the build made
	rm -rf build $(VENV)

# The few commands a person types. `make demo` and `make test` install what they need.
PYTHON ?= python3
ENGINE ?= simulated
UV := uv==0.13.9
BIN := .venv/bin

.PHONY: help install engine-cpu demo lint format test test-fast bench clean

help:            ## this list
	@sed -n 's/^\([a-z-]*:\).*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: .venv/.installed   ## the environment of the gateway and its tests

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(UV)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@touch $@

engine-cpu:      ## vLLM's CPU release, in an environment of its own
	$(PYTHON) serving/engine/cpu_env.py .venv-engine

demo: install $(if $(filter vllm,$(ENGINE)),engine-cpu)   ## lanes against what they replace, side by side (ENGINE=vllm: on real vLLM)
	$(BIN)/python -m serving.workload.demo --engine $(ENGINE) --out runs/demo

lint: install    ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## ruff's formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: install engine-cpu   ## every test: fast, integration (real processes), slow (load and faults)
	$(BIN)/python -m pytest -m 'slow or not slow'

test-fast: install   ## the fast tests alone
	$(BIN)/python -m pytest

bench: install   ## the overhead table; the others are in tests/bench/
	$(BIN)/python -m tests.bench.overhead

clean:           ## environments and runs
	rm -rf .venv .venv-engine .bench runs

# Everything a person or CI runs. `make` alone prints the list.
# Set-up is part of demo, test, lint and docs: a virtual environment in .venv, made once and again when pyproject.toml changes.

PYTHON ?= python3
TORCH  ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),torch<2.16,torch==2.13.0)
ARGS   ?=

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

# test-gpu and bench install nothing: a GPU machine may reach no package registry, and has its own torch.
# They run in $(PYTHON) where it was given, else in .venv where there is one.
RUN = $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))

# no GPU, no test over half a minute; a process for each core, a file in one of them
QUICK := --ignore=tests/gpu -m "not gpu and not slow" --timeout=300 --numprocesses=auto --dist=loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-all bench lint format docs clean

help:  ## print this list
	@echo "make TARGET [ARGS='...'] [PYTHON=python3] [TORCH='torch==2.13.0']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small MoE language model, about two minutes on a CPU; ARGS='--steps 50'
	$(BIN)/fusedmoe demo $(ARGS)

test: $(READY)  ## every test that needs neither a GPU nor long; ARGS='-k dispatch'
	$(BIN)/python -m pytest tests $(QUICK) $(ARGS)

test-gpu:  ## the tests that need an NVIDIA GPU, with what is installed
	$(RUN) -m pytest tests/gpu --results benchmarks/results $(ARGS)

test-all: $(READY)  ## every test there is, the slow ones too
	$(BIN)/python -m pytest tests $(ARGS)

bench:  ## the benchmarks, with what is installed
	$(RUN) -m benchmarks $(ARGS)

lint: $(READY)  ## ruff (check and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build docs/ into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --builder html docs docs/_build/html

clean:  ## remove what was built; .venv stays
	rm -rf build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find fusedmoe tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): export PIP_DISABLE_PIP_VERSION_CHECK = 1
$(READY): pyproject.toml | $(BIN)/pip
	@echo "installing $(TORCH), fusedmoe and its tools into $(VENV)"
	@$(BIN)/pip install --quiet --quiet "$(TORCH)"
	@$(BIN)/pip install --quiet --quiet --editable ".[dev,demo]"
	@$(BIN)/pip install --quiet --quiet --no-deps "torchtitan==0.3.*"  # without its data sets and trackers
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "fusedmoe needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# The targets for developers and CI. `make` alone prints the list.
# demo, test*, sass-diff, lint, format and docs (except test-gpu) set up a virtual environment in .venv, again after a change of
# pyproject.toml.

PYTHON ?= python3
TORCH  ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),torch<2.16,torch==2.13.0)
ARGS   ?=
BASE   ?= HEAD
# NVIDIA's kernels for Blackwell, whose tests need no GPU; for Linux only
BLACKWELL := $(if $(filter Linux,$(shell uname -s)),nvidia-cudnn-frontend==1.32.*)

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

# test-gpu, soak and bench install nothing: a GPU machine has its own torch, and may have no access to a package
# registry. They run with $(PYTHON) if given, else in .venv if it exists.
RUN = $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))

# without tests that need a GPU or over half a minute; one process per core, each file in one process
QUICK := --ignore=tests/gpu -m "not gpu and not slow" --timeout=300 --numprocesses=auto --dist=loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-all test-emulator test-benchmarks sass-diff soak bench lint format docs clean

help:  ## print this list
	@echo "make TARGET [ARGS='...'] [PYTHON=python3] [TORCH='torch==2.13.0']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small MoE language model, about two minutes on a CPU; ARGS='--steps 50'
	$(BIN)/fusedmoe demo $(ARGS)

test: $(READY)  ## every quick test that needs no GPU; ARGS='-k dispatch'
	$(BIN)/python -m pytest tests $(QUICK) $(ARGS)

test-gpu:  ## the tests that need an NVIDIA GPU, and fusedmoe verify, with the installed packages
	$(RUN) -m pytest tests/gpu --results benchmarks/results $(ARGS)
	$(RUN) -m fusedmoe verify

test-all: $(READY)  ## every test, including slow ones
	$(BIN)/python -m pytest tests $(ARGS)

test-emulator: $(READY)  ## every kind of kernel on the emulator, including slow ones
	$(BIN)/python -m pytest tests/unit/test_emulat*.py $(ARGS)

test-benchmarks: $(READY)  ## the benchmarks, the soak and the demo, including slow tests
	$(BIN)/python -m pytest tests/unit/test_bench*.py tests/unit/test_soak.py tests/unit/test_demo.py $(ARGS)

sass-diff: $(READY)  ## compare the machine code of every kernel with a revision's; BASE=main ARGS='--only sm90_ragged_k_*'
	PYTHONPATH=tests $(BIN)/python -m kit.sass_diff '$(BASE)' $(ARGS)

soak:  ## every Hopper kernel thousands of times, with the installed packages; ARGS='--only sm90_ragged_k_*'
	$(RUN) -m benchmarks.soak $(ARGS)

bench:  ## the benchmarks, with the installed packages
	$(RUN) -m benchmarks $(ARGS)

lint: $(READY)  ## ruff (check and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## format the files with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build docs/ into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --builder html docs docs/_build/html

clean:  ## remove build results, except .venv
	rm -rf build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find fusedmoe tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): export PIP_DISABLE_PIP_VERSION_CHECK = 1
$(READY): pyproject.toml | $(BIN)/pip
	@echo "installing $(TORCH), fusedmoe and its tools into $(VENV)"
	@$(BIN)/pip install --quiet --quiet "$(TORCH)"
	@$(BIN)/pip install --quiet --quiet --editable ".[dev,demo]"
	@$(BIN)/pip install --quiet --quiet --no-deps "torchtitan==0.3.*"  # without its data sets and trackers
	@$(if $(BLACKWELL),$(BIN)/pip install --quiet --quiet --no-deps "$(BLACKWELL)")  # without a second kernel compiler
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "fusedmoe needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

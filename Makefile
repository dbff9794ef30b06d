# Everything needs only Python 3.11 and make: `make quickstart`, then `make test`.

PYTHON ?= python3.11
VENV ?= .venv
STUDY ?= search_spaces/presets/quickstart.yaml
TEST_ARGS ?=
# An extra package index for torch wheels that fit this machine, e.g. PyTorch's own CPU index; see docs/install.md.
TORCH_INDEX ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart install test check lint format types imports acceptance benchmarks mutate lock wheel clean

export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := requirements/lock.txt
PACKAGES := autotune launchers search_spaces

# Commands of `make acceptance` after `pytest -m acceptance`, one per line. Whoever adds a benchmark adds its line here.
define BENCHMARKS
endef

help:  ## Show the targets
	@echo "Usage: make TARGET [PYTHON=/path/to/python3.11]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

quickstart: $(STAMP)  ## Install into .venv if needed, then tune a small model on this machine's CPU
	$(BIN)/autotune tune $(STUDY)

install: $(STAMP)  ## Only create .venv and install

$(STAMP): $(LOCK) pyproject.toml
	@requirements/install.sh '$(PYTHON)' '$(VENV)' '$(TORCH_INDEX)'
	@touch $@

test: $(STAMP)  ## Run the tests that need no GPU (at most 10 minutes on 2 cores)
	@$(BIN)/python -m pytest -m "not gpu and not acceptance" $(TEST_ARGS)

check: lint types imports test  ## Lint, types, import contracts, tests: what a change must pass

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## mypy --strict on the three packages
	$(BIN)/mypy

imports: $(STAMP)  ## The direction autotune -> launchers -> search_spaces
	$(BIN)/lint-imports

acceptance: $(STAMP)  ## The slow promises: acceptance tests, then every benchmark
	$(BIN)/python -m pytest -m "acceptance and not gpu" $(TEST_ARGS)
	@$(MAKE) --no-print-directory benchmarks

export BENCHMARKS
benchmarks: $(STAMP)  ## Every benchmark; each prints a table and writes JSON
	@export PATH="$(abspath $(BIN)):$$PATH"; \
	while IFS= read -r line; do [ -z "$$line" ] || { echo "+ $$line"; bash -c "$$line"; }; done <<< "$$BENCHMARKS"

mutate: $(STAMP)  ## Break one rule at a time and show whether a test notices
	$(BIN)/python tests/mutate.py

lock:  ## Resolve pyproject.toml anew and rewrite requirements/lock.txt
	@requirements/lock.sh '$(PYTHON)' '$(LOCK)' '$(TORCH_INDEX)'

wheel: $(STAMP)  ## Build dist/*.whl without network
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## Remove .venv, caches and build results; studies under .autotune stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

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
.PHONY: help quickstart install test check lint format types imports acceptance mutate lock wheel clean

export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := requirements/lock.txt
PACKAGES := autotune launchers search_spaces

# What `make acceptance` runs: every promise of docs/acceptance.md, one command a line. Whoever makes a promise adds its line here.
define ACCEPTANCE
python benchmarks/overhead.py
pytest -m "" tests/integration/test_two_pools.py
pytest -m "" tests/integration/test_shared_cluster.py
pytest -m "" tests/faults
pytest -m "" tests/integration/test_network.py
pytest -m "" tests/test_layout.py tests/integration/test_install.py tests/integration/test_mlflow_server.py
pytest -m "" tests/autotune
pytest -m "" tests/launchers
pytest -m "" tests/search_spaces
python benchmarks/legality_agreement.py --megatron 0.16 --cases 10000
python benchmarks/legality_agreement.py --megatron 0.19 --cases 10000 --workers 2
pytest -m "" tests/telemetry
python benchmarks/telemetry_overhead.py
python benchmarks/repeatability.py
python benchmarks/legality_space.py
python benchmarks/prediction_speed.py
python benchmarks/legal_trains.py --cases 200
python benchmarks/proposal_time.py
python benchmarks/exhaustive_cpu.py --output exhaustive_cpu.json
python benchmarks/racing_replay.py exhaustive_cpu.json
python benchmarks/real_search.py exhaustive_cpu.json
pytest -m acceptance tests/gpu
python tests/gpu/one_gpu.py
python benchmarks/search_twins.py --studies 25 --methods residual --workers 2
pytest -m "" tests/integration/test_confirmed_alone.py
python benchmarks/accuracy.py "$$PUBLISHED"
python benchmarks/search_replay.py "$$PUBLISHED" --workers 2
python benchmarks/search_replay.py "$$PUBLISHED" --workers 2 --misled
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

export ACCEPTANCE
acceptance: $(STAMP)  ## Every promise of docs/acceptance.md, by hand: takes a few hours; PUBLISHED=FOLDER for published tables
	@export PATH="$(abspath $(BIN)):$$PATH"; failed=0; \
	while IFS= read -r line; do [ -z "$$line" ] || { echo "+ $$line"; bash -c "$$line" || { failed=1; echo "NOT SHOWN: $$line"; }; }; \
	done <<< "$$ACCEPTANCE"; exit $$failed

mutate: $(STAMP)  ## Break one rule at a time and show whether a test notices
	$(BIN)/python tests/mutate.py

lock:  ## Resolve pyproject.toml anew and rewrite requirements/lock.txt
	@requirements/lock.sh '$(PYTHON)' '$(LOCK)' '$(TORCH_INDEX)'

wheel: $(STAMP)  ## Build dist/*.whl without network
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## Remove .venv, caches and build results; studies under .autotune stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

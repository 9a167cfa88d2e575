# Drafthouse: `make help` lists what there is. Everything runs in .venv, which `make install` makes.

PORT   ?=
CONFIG ?= configs/demo.yaml
ARGS   ?=
# How tests are divided over processes; empty: not at all. In the order of collection: those that start Ray come early.
WORKERS ?= -n 2 --dist loadscope --no-loadscope-reorder

BIN   := .venv/bin
STAMP := .venv/.drafthouse-installed

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

.PHONY: help install serve test test-all gpu check lint types imports format hooks bench-quick pin clean distclean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## *\(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || \
	    grep '## ' Makefile

install: $(STAMP)  ## .venv with pinned dependencies; does nothing when it is up to date

$(STAMP): pyproject.toml constraints.txt scripts/install
	@scripts/install
	@touch $@

serve: install  ## a local Ray cluster with the demo pair (CONFIG=configs/demo.yaml PORT=8123)
	@exec $(BIN)/drafthouse serve $(CONFIG) $(if $(PORT),--port $(PORT)) $(ARGS)

test: install  ## unit tests and pairwise matrices (ARGS="-k name" passes options to pytest)
	@exec $(BIN)/python -m pytest $(WORKERS) -m "not gpu and not full" $(ARGS)

test-all: install  ## everything, the long matrices too; GPU tests run where there is a GPU
	@exec $(BIN)/python -m pytest $(WORKERS) $(ARGS)

gpu: install  ## tests and quick benchmarks on a GPU (ARGS="folder" for raw results)
	@exec scripts/gpu $(ARGS)

check: lint types imports  ## all that reads the code without running it

lint: install  ## ruff and codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: install  ## mypy, strict on specdec
	$(BIN)/mypy

imports: install  ## import-linter: the arrows between the layers
	$(BIN)/lint-imports

format: install  ## rewrite the code the way `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: install  ## run the checks before every commit of this clone
	$(BIN)/pre-commit install

bench-quick: install  ## a short run of the offline benchmark
	@exec $(BIN)/python benchmarks/offline.py --quick $(ARGS)

pin: install  ## write constraints.txt from what is installed
	$(BIN)/python scripts/pin_constraints.py

clean:  ## remove caches and build results
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf .venv

# `make demo` and `make test` do all their own set-up on a machine with Python >= 3.11, make and git.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
UV := $(shell command -v uv 2>/dev/null)
ifdef UV
INSTALL = $(UV) pip install --quiet --python $(BIN)/python
else
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help demo test test-all check bench lab lock clean browser

help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

.venv/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ragbench needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	touch $@

.venv/run: .venv/python requirements.lock pyproject.toml
	$(INSTALL) -r requirements.lock
	$(INSTALL) --no-deps -e .
	touch $@

.venv/test: .venv/run requirements-test.lock
	$(INSTALL) -r requirements-test.lock
	touch $@

browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing chromium for the browser tests' && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-noto-cjk >/dev/null; \
	else echo 'no chromium here: browser tests will be skipped'; fi

demo: .venv/run ## run the bundled study and write its report
	ragbench demo

test: .venv/test browser ## every notebook, and all tests but the slow ones
	nbdev-test nbs --n-workers 2
	python -m pytest -n 2 -q -m "not slow" tests

test-all: .venv/test browser ## the slow tests too
	nbdev-test nbs --n-workers 2 --flags slow
	python -m pytest -n 2 -q tests

check: .venv/test ## notebooks against modules, layers, lint, types, spelling
	python tools/check_export.py
	python tools/make_reference.py --check
	lint-imports
	ruff check .
	mypy
	codespell README.md CHANGELOG.md docs tools benchmarks experiments ragbench

bench: .venv/test ## speed beside peers and floors, as ratios of one run
	for f in benchmarks/bench_*.py; do python $$f; done

lab: .venv/run ## JupyterLab on the workbench
	ragbench lab

lock: ## pin the tested versions anew (needs uv)
	uv pip compile -q --universal --python-version 3.11 pyproject.toml -o requirements.lock
	uv pip compile -q --universal --python-version 3.11 --extra test -c requirements.lock pyproject.toml -o requirements-test.lock

clean: ## remove the environment, the cache and the runs
	rm -rf .venv .ragbench runs

# `make demo` and `make test` work in a fresh clone: they make .venv and install what is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long lint bench sandbox-tools test-tools
.DEFAULT_GOAL := demo

demo: .venv/core.stamp sandbox-tools
	@examples/demo.sh

# Most tests wait for processes and syncs rather than for a core, so three workers suit two cores.
test: .venv/dev.stamp sandbox-tools test-tools
	$(BIN)/pytest -q -n 3 --dist worksteal -m "not long"

test-long: .venv/dev.stamp sandbox-tools test-tools
	@$(BIN)/pytest -q -m long || { code=$$?; [ $$code -eq 5 ] && echo "no long tests yet" || exit $$code; }

lint: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: .venv/dev.stamp
	$(BIN)/python bench/store.py $(BENCH_ARGS)
	$(BIN)/python bench/resume.py $(BENCH_ARGS)
	$(BIN)/python bench/areal.py $(BENCH_ARGS)

# The strongest sandbox isolation comes from bubblewrap; never fatal, because there are weaker ones.
sandbox-tools:
	@command -v bwrap >/dev/null 2>&1 || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1 || { \
	  export DEBIAN_FRONTEND=noninteractive; install="timeout 120 apt-get install -y -qq --no-install-recommends bubblewrap"; \
	  $$install >/dev/null 2>&1 || { timeout 120 apt-get update -qq >/dev/null 2>&1 && $$install >/dev/null 2>&1; } || \
	  echo "bubblewrap could not be installed; sandboxes use what else this machine offers" >&2; }

# A pooler for the tests of the store behind one, where installing it starts no service; else they are skipped loudly.
test-tools:
	@command -v pgbouncer >/dev/null 2>&1 || [ "$$(id -u)" != 0 ] || [ -d /run/systemd/system ] || \
	! command -v apt-get >/dev/null 2>&1 || { \
	  export DEBIAN_FRONTEND=noninteractive; install="timeout 120 apt-get install -y -qq --no-install-recommends pgbouncer"; \
	  $$install >/dev/null 2>&1 || { timeout 120 apt-get update -qq >/dev/null 2>&1 && $$install >/dev/null 2>&1; } || \
	  echo "pgbouncer could not be installed; the tests that need it are skipped" >&2; }

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv

.venv/core.stamp: pyproject.toml | .venv/bin/python
	@echo "installing into .venv" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

.venv/dev.stamp: pyproject.toml | .venv/bin/python
	@echo "installing into .venv, with the development tools" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@ .venv/core.stamp

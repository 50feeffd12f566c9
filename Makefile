# `make compare` and `make test` create .venv from locked versions when it is missing or out of
# date.  Another Python: `make test PYTHON=python3.12 VENV=.venv312`.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/quickstart.py
OUT ?= out/compare
ARGS ?=
PYTEST_ARGS ?= -n auto --dist loadfile

# 3.11 has its own JAX line; everything newer runs the newest.
MINOR := $(shell $(PYTHON) -c 'import sys; print(min(sys.version_info[1], 12) if sys.version_info[0] == 3 else 0)' 2>/dev/null)
LOCK := requirements/py3$(MINOR).txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-py3$(MINOR)

.PHONY: help compare test lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make compare   compare the strategies of CONFIG=$(CONFIG), write $(OUT)"
	@echo "make test      lint, check the format, run the tests"
	@echo "make lint      ruff check and ruff format --check"
	@echo "make format    rewrite the sources the way ruff wants them"
	@echo "make clean     remove $(VENV) and out"

$(LOCK):
	@echo "error: $(PYTHON) is no Python 3.11 or newer; name one with PYTHON=python3.11" >&2
	@exit 2

$(STAMP): $(LOCK) pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

compare: $(STAMP)
	$(BIN)/python -m launch.compare --config=$(CONFIG) --out=$(OUT) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out

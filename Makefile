# Every target works as the first and only command on a fresh checkout: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench simulate fuzz clean

demo: $(READY)
	$(BIN)/python -m examples.demo

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m bench

# All mutations, then schedules until the time is over: make simulate SECONDS=3600
simulate: $(READY)
	$(BIN)/python -m tests.simulation --mutations --workers 2 --seconds $(or $(SECONDS),540)

# For as long as you like: make fuzz SECONDS=3600
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),120)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis

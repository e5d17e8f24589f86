# Each command makes its own environment in .venv and installs all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The servers of `make conformance`. With aws it costs money, and needs credentials and a region.
SQS_SERVER ?= moto ministack localstack

.PHONY: help demo test bench chaos conformance lint types clean

help:
	@echo "make demo   an outage of a mail provider, and how 300 mails survive it"
	@echo "make test   lint, types and all tests"
	@echo "make bench  our worker beside stock Celery, in one run"
	@echo "make conformance  the tests that speak to SQS, on other servers; SQS_SERVER=aws: on the real one"
	@echo "make chaos  2,500 tasks, spoiled calls to SQS and killed workers: nothing lost"

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m example_project.demo

test: lint types
	$(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python -m benchmarks.worker
	$(BIN)/python -m benchmarks.redrive

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --tasks 2500 --seed 1
	REDRIVE_KILLS=20 $(BIN)/python -m pytest tests/acceptance/test_redrive_kill.py

conformance: $(STAMP)
	$(BIN)/python -m pip install --quiet 'tox>=4.20'
	$(BIN)/python -m tox $(foreach server,$(SQS_SERVER),-e server-$(server))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis

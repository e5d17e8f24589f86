# Each command makes its own environment in .venv and installs all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Test processes at a time; each starts servers of its own. One computes, and the others wait for
# workers and servers most of the time, so there are more of them than cores.
JOBS ?= 4
PYTEST = $(BIN)/python -m pytest
ALL = -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Tests start Python a few hundred times. Those processes share compiled modules, also where the
# environment says otherwise, as in many containers.
unexport PYTHONDONTWRITEBYTECODE

# Of `make room` and `make coverage`: retry, sqs, task, worker, provider, safe, redrive, observe,
# doctor, simulate, classifiers, commands or house. Of `make mutants`: worker, task, safe, redrive or
# provider, and without one all five.
ROOM ?=

# The servers of `make conformance`. With aws it costs money, and needs credentials and a region.
SQS_SERVER ?= moto ministack localstack

# Of `make mutants` and of the simulations.
SEED ?= 0
HISTORIES ?= 20000

# The lines of Celery of `make celery-suite`: 5.5, 5.6 and 5.7 unless it names some.
CELERY ?=

.PHONY: help matrix docs release-check demo test quick room mutants coverage long durations bench chaos conformance celery-suite lint types clean simulate-faults simulate-safe simulate-redrive

help:
	@echo "make demo   an outage of a mail provider, and how 2,000 mails survive it"
	@echo "make test   lint, types and all tests, within 8 minutes; JOBS=1: one after the other"
	@echo "make quick  the fast unit tests, within 40 seconds"
	@echo "make room   all tests of one room; ROOM=redrive"
	@echo "make mutants  80 mistakes planted into a room, and the fast tests that find them; ROOM=redrive"
	@echo "make coverage  branches of a room that its tests without workers reach; ROOM=redrive"
	@echo "make long   the long forms that make test leaves out"
	@echo "make durations  all tests, and write down how long each takes"
	@echo "make docs   the site, into build/docs; each warning is an error"
	@echo "make release-check  two equal builds, the wheel with each extra, public names and their types"
	@echo "make matrix  the fast tests on every Python, Celery and Django, lowest versions, no extras"
	@echo "make bench  our worker beside stock Celery, in one run"
	@echo "make conformance  the tests that speak to SQS, on other servers; SQS_SERVER=aws: on the real one"
	@echo "make celery-suite  Celery's own tests, on stock and with our task class; CELERY=5.7: on that line"
	@echo "make simulate-faults  workers and SQS in virtual time, with faults; SEED=0 HISTORIES=20000"
	@echo "make simulate-safe  guard, step and workflow, killed between any two lines; SEED=0"
	@echo "make simulate-redrive  redrives with faults, killed between any two calls; SEED=0"
	@echo "make chaos  2,500 tasks, spoiled calls to SQS and killed workers: nothing lost"

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# Into build/docs. A warning is an error, and so is a name of ours that does not exist.
docs: $(STAMP)
	$(BIN)/python -m sphinx -n -W --keep-going -q docs build/docs

$(VENV)/.installed-release: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[release]'
	@touch $@

release-check: $(VENV)/.installed-release
	$(BIN)/python -m tests.release

demo: $(STAMP)
	$(BIN)/python -m example_project.demo

# mypy computes beside the tests, and says first what it finds.
test: lint
	@$(BIN)/mypy & types=$$!; $(PYTEST) $(ALL); tests=$$?; wait $$types && exit $$tests

quick: $(STAMP)
	$(PYTEST) -q -n 2 -m "not slow and not long" tests/unit tests/rig

room: $(STAMP)
	files=$$($(BIN)/python -m tests.rooms $(ROOM)) && $(PYTEST) -n 2 --dist loadfile $$files

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --jobs 2 --seed $(SEED) $(ROOM)

coverage: $(STAMP)
	files=$$($(BIN)/python -m tests.rooms $(ROOM) unit rig simulation) \
	&& $(PYTEST) -q $$files --cov celery_sqs_backoff/$(ROOM) --cov-branch

long: $(STAMP)
	$(PYTEST) -m long --timeout 900

durations: $(STAMP)
	$(PYTEST) $(ALL) --junit-xml .durations.xml
	$(BIN)/python -m tests.lanes .durations.xml

bench: $(STAMP)
	$(BIN)/python -m benchmarks.worker
	$(BIN)/python -m benchmarks.redrive

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --tasks 2500 --seed 1
	REDRIVE_KILLS=20 $(BIN)/python -m pytest tests/acceptance/test_redrive_kill.py

conformance: $(STAMP)
	$(BIN)/python -m pip install --quiet 'tox>=4.20'
	$(BIN)/python -m tox $(foreach server,$(SQS_SERVER),-e server-$(server))

# Arguments of pytest, such as TESTS=tests/acceptance/test_retry.py.
TESTS ?= -n 2 -m "not slow and not long" tests/unit tests/rig

matrix: $(STAMP)
	$(BIN)/python -m pip install --quiet 'tox>=4.20'
	$(BIN)/python -m tox run -m matrix -- -q $(TESTS)

celery-suite: $(STAMP)
	$(BIN)/python -m tests.celery_suite $(CELERY)

simulate-faults: $(STAMP)
	HYPOTHESIS_PROFILE=explore SIMULATED_HISTORIES=$(HISTORIES) $(PYTEST) --timeout 0 --hypothesis-seed $(SEED) tests/simulation/test_histories.py

simulate-safe: $(STAMP)
	$(BIN)/python -m tests.simulation.safe --seed $(SEED) --histories 2000

simulate-redrive: $(STAMP)
	$(BIN)/python -m tests.simulation.redrive_history --seed $(SEED) --histories 2000

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Each command makes the environment .venv, if there is none, and installs what it needs there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# How many processes run tests at the same time. Each starts its own servers. One runs the tests
# that compute. The others mostly wait for workers and servers, so there may be more processes
# than cores.
JOBS ?= 4
PYTEST = $(BIN)/python -m pytest
ALL = -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Tests start Python a few hundred times. With this variable, which many containers set, each
# process would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# A room is a subpackage of celery_sqs_backoff. `make room` and `make coverage` take one of retry,
# sqs, task, worker, provider, safe, redrive, observe, doctor, simulate, classifiers and commands,
# or house for the tests that belong to none. `make mutants` takes worker, task, safe, redrive or
# provider, or all five by default.
ROOM ?=

# The SQS servers for `make conformance`. With aws it costs money, and needs credentials and a
# region.
SQS_SERVER ?= moto ministack localstack

# For `make mutants` and the simulations. SEED decides what they draw.
SEED ?= 0
HISTORIES ?= 20000

# The versions of Celery for `make celery-suite`. Without any, it uses 5.5, 5.6 and 5.7.
CELERY ?=

.PHONY: help matrix docs release-check demo test quick room mutants coverage long durations bench chaos conformance celery-suite lint types clean simulate-faults simulate-safe simulate-redrive

help:
	@echo "make demo   show how 2,000 mails survive an outage of their provider"
	@echo "make test   run lint, types and all tests, within 8 minutes; JOBS=1 for one test at a time"
	@echo "make quick  run the fast unit and rig tests, within 40 seconds"
	@echo "make room   run all tests of one subpackage; ROOM=redrive"
	@echo "make mutants  make 80 mistakes in a subpackage, and show which the fast tests find; ROOM=redrive"
	@echo "make coverage  show the branches that the tests without workers do not reach; ROOM=redrive"
	@echo "make long   run the long forms that make test leaves out"
	@echo "make durations  run all tests, and record how long each takes"
	@echo "make docs   build the site into build/docs; each warning is an error"
	@echo "make release-check  check builds, the wheel with each extra, public names and their types"
	@echo "make matrix  run the fast tests on every Python, Celery and Django, and on the lowest versions"
	@echo "make bench  compare our worker with stock Celery, and measure a redrive"
	@echo "make conformance  run the tests that call SQS on other servers; SQS_SERVER=aws for the real SQS"
	@echo "make celery-suite  run Celery's own tests with our task class; CELERY=5.7 for one version"
	@echo "make simulate-faults  simulate workers with faults and kills; SEED=0 HISTORIES=20000"
	@echo "make simulate-safe  simulate guards, steps and workflows with kills at any line; SEED=0"
	@echo "make simulate-redrive  simulate redrives with faults and kills; SEED=0"
	@echo "make chaos  kill workers and let calls to SQS fail during 2,500 tasks, and check that none is lost"

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# A warning is an error. So is a reference to a name that does not exist.
docs: $(STAMP)
	$(BIN)/python -m sphinx -n -W --keep-going -q docs build/docs

$(VENV)/.installed-release: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[release]'
	@touch $@

release-check: $(VENV)/.installed-release
	$(BIN)/python -m tests.release

demo: $(STAMP)
	$(BIN)/python -m example_project.demo

# mypy runs at the same time as the tests, and prints its findings first.
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

# Arguments for pytest, such as TESTS=tests/acceptance/test_retry.py.
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

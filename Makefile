# One command for everything; CI calls the same ones. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that is new enough and really runs.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$name && break; \
	done)
BIN := .venv/bin
# The dashboard's sources too: installing builds it, and leaves it alone while it is newer than they are.
INPUTS := pyproject.toml requirements.lock hatch_build.py \
	$(shell find service/dashboard/web -name node_modules -prune -o -type f -print)
# State of the services that `make demo` and `make up` start: both show the same record.
export MUONSCOPE_HOME ?= $(CURDIR)/.muonscope
# On machines without a GPU torch's compiler costs seconds of start and changes no number that is tested here; the numbers
# are float32's, whatever the processor multiplies fast.
TEST_ENVIRONMENT := TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu MUON_CORE_CPU_DTYPE=float32
PYTEST := $(TEST_ENVIRONMENT) $(BIN)/python -m pytest
# What shares something slow to start stays together, as tests/conftest.py says.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 4 --no-loadscope-reorder

.PHONY: help
help: ## List the commands.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Not quiet: minutes without a word look like a command that hangs.
# What is said of it goes where errors go: what `make demo ARGS=--json` prints is read by programs.
PIP_INSTALL := >&2 $(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -c requirements.lock
SAY_WHAT_COMES := echo 'downloading PyTorch, Ray, DeepSpeed and what they need into .venv: once, for some minutes.' >&2 && \
	echo 'It takes about 1.4 GB with the CPU build of PyTorch, more with a CUDA build.' >&2

# Each stamp is newer than what it was made from: a second call has nothing to do.
.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11, 3.12 or 3.13 is needed; none was found" >&2; exit 1; fi
	$(PYTHON) -m venv .venv

.venv/installed: $(INPUTS) | .venv/bin/python
	@$(SAY_WHAT_COMES)
	@$(PIP_INSTALL) -e .
	@touch $@

.venv/installed-dev: $(INPUTS) | .venv/bin/python
	@$(SAY_WHAT_COMES)
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@ .venv/installed

.PHONY: install install-dev
install: .venv/installed ## Make .venv with what is needed to run.
install-dev: .venv/installed-dev ## Make .venv with what is needed to work on the code.

.PHONY: demo up
demo: .venv/installed ## Run the thirty-step experiment from nothing and print its table (ARGS=--json and others).
	@$(BIN)/muonscope experiment run thirty-step $(ARGS)

up: .venv/installed ## Start the service here, on port 8800 (ARGS="--port 8801" and others).
	@$(BIN)/muonscope up $(ARGS)

.PHONY: check format test acceptance faults soak mutants golden bench bench-gpu
check: .venv/installed-dev ## Formatting, lint, types, import rules; the dashboard's types where Node's packages are.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-types check-web check-format check-imports

.PHONY: check-format check-types check-imports check-web
check-format: ## Formatting and lint.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check-types: ## Types.
	$(BIN)/mypy

check-imports: ## Which package may import which.
	$(BIN)/lint-imports

check-web: ## The dashboard's types and lint.
	@if [ -d service/dashboard/web/node_modules ]; then \
		PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix service/dashboard/web run --silent check; fi

format: .venv/installed-dev ## Put the code into the one format.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check ## The checks, then every test but `faults` and those that need a GPU (ARGS="-k name" and others).
	$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)

faults: .venv/installed-dev ## Kill, stop and fill things while runs train; minutes.
	$(PYTEST) tests/faults tests/integration -m faults $(ARGS)

soak: .venv/installed-dev ## Kill parts at random under short runs for two minutes (ARGS="--seconds 900 --runs 60").
	$(TEST_ENVIRONMENT) $(BIN)/python -m tests.faults.soak $(ARGS)

mutants: .venv/installed-dev ## Plant faults into copies of muon_core and see each killed; minutes (writes docs/mutants.md).
	$(BIN)/python tests/mutation/run.py --docs docs/mutants.md $(ARGS)

golden: .venv/installed-dev ## Hold the golden numbers against this machine.
	$(PYTEST) tests/distributed/test_published_numbers.py tests/integration/releases $(ARGS)

acceptance: .venv/installed-dev ## A release, byte-gpt, the tutorial, the dashboard, exit codes, a cluster, Compose and Slurm on real runs; minutes.
	$(PYTEST) tests -m acceptance $(ARGS)

bench: .venv/installed-dev ## Print measured numbers on the CPU.
	$(TEST_ENVIRONMENT) MUON_CORE_CPU_DTYPE=auto $(BIN)/python -m pytest tests/benchmarks -s \
		-m 'benchmark and not gpu and not multi_gpu' $(ARGS)

.PHONY: screenshots
screenshots: .venv/installed-dev ## Train the published table and take the pictures in docs/screenshots (ARGS=--only ...).
	$(TEST_ENVIRONMENT) $(BIN)/python -m tests.web.screenshots $(ARGS)

bench-gpu: .venv/installed-dev ## Print measured numbers on this machine's GPUs.
	$(BIN)/python -m pytest $(wildcard tests/benchmarks/test_*gpu*.py) -s -m 'benchmark and (gpu or multi_gpu)' $(ARGS)

.venv-trackers/installed: tests/benchmarks/trackers/requirements.txt
	@echo 'downloading Trackio, MLflow and W&B into .venv-trackers: once, for some minutes, about 1 GB.' >&2
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install --quiet --progress-bar off --disable-pip-version-check -r $<
	@touch $@

.PHONY: bench-trackers
bench-trackers: .venv/installed-dev .venv-trackers/installed ## Give Muonscope and other trackers the same work (ARGS=--only ...).
	$(BIN)/python tests/benchmarks/trackers/yardstick.py $(ARGS)

.PHONY: docs
docs: .venv/installed-dev ## Build the documentation into site/, its reference made from the code; warnings are errors.
	$(TEST_ENVIRONMENT) $(BIN)/mkdocs build --strict --quiet $(ARGS)

.PHONY: db-revision
db-revision: .venv/installed-dev ## Write a migration for the models' changes: make db-revision m="add run notes".
	@if [ -z "$(m)" ]; then echo 'say what changes: make db-revision m="add run notes"' >&2; exit 1; fi
	$(BIN)/alembic revision --autogenerate -m "$(m)"

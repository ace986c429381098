# Two commands do everything on a machine that has Python 3.11 and a C++ compiler: `make demo` and `make test`.
# `make test WORKERS=8` on a machine of eight cores.

PYTHON ?= python3.11
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-rest test-long test-all test-torch lint format bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,bench,lint,sim]'
	touch $@

demo: $(INSTALLED)  ## compile a real model, compare it with Inductor, print the audit and write examples/audit.html
	$(BIN)/python examples/llama.py --audit examples/audit.html

test: $(INSTALLED)  ## the fast tier: each behaviour once
	$(PYTEST) -m "not slow"

test-rest: $(INSTALLED)  ## what the fast tier leaves out, and more of the cases that tests draw themselves
	$(PYTEST) -m "(slow or drawn) and not long" --hypothesis-profile=many

test-long: $(INSTALLED)  ## faults on each rank, more kills, more random programs: more than continuous integration has time for
	$(PYTEST) -m long

test-all: $(INSTALLED)  ## every test
	$(PYTEST) --hypothesis-profile=many

TORCH ?= 2.11.0
test-torch:  ## the devices' tests with another torch, in an environment of its own: make test-torch TORCH=2.15.0
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet torch==$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet --editable '.[test,sim]'
	.venv-torch-$(TORCH)/bin/python -m pytest tests/devices

lint: $(INSTALLED)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(INSTALLED)  ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## the benches, small
	$(BIN)/python bench/bench_overhead.py --quick
	$(BIN)/python bench/bench_models.py --quick

clean:  ## remove what was made here
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache build *.egg-info examples/audit.html

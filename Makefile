# `make spider` and `make test` need Python 3.11+ and nothing else. The set-up runs once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONFIG ?= experiments/configs/spider_cpu.yaml

.PHONY: spider test lint clean setup

spider: $(READY)
	$(BIN)/python experiments/spider.py --config $(CONFIG) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

setup: $(READY)

$(READY): requirements.txt requirements-nodeps.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"{sys.executable} is Python {v.major}.{v.minor}; expected 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-nodeps.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV)

# `make spider`, `make musique`, `make calcx` and `make test` need Python 3.11+ and nothing else. The
# set-up runs once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs
READY := $(VENV)/.ready
# make calcx CONFIG=experiments/configs/calcx.yaml ARGS='data.root=DIR run_dir=runs/mine'
EXPERIMENTS := spider musique calcx sums openended

# uv takes a tenth of pip's time. pip knows more ways to be told of a registry, so it is asked second.
install = $(BIN)/python -m uv pip install --quiet --python $(BIN)/python $(1) || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(1)

# Tests that need no model, or compile little.
QUICK := test_layering.py test_voice.py test_errors.py settings test_types.py test_promises.py system traces \
	rl/test_credit.py rl/test_advantages.py rl/test_token_weights.py rl/batches/test_packing.py \
	rl/losses/test_ratios.py gateway/calls/test_routing.py gateway/prompt/test_tool_calls.py \
	experiments/data/test_sums.py train/tasks/test_pipelines.py train/tasks/test_demonstrations.py rollouts/agents/test_outcome.py

.PHONY: $(EXPERIMENTS) test check quick lint clean setup docs

# Huge pages take a tenth off an update on a CPU; a C library that is not glibc ignores this.
$(EXPERIMENTS): export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
$(EXPERIMENTS): $(READY)
	$(BIN)/python experiments/$@.py --config $(or $(CONFIG),experiments/configs/$@_cpu.yaml) $(ARGS)

# Lint and types, then all tests, or those of ARGS alone. A process for each core, at most four: each
# takes up to 3 GB.
test: $(READY) $(if $(ARGS),,lint)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

# Lint, types, layering and quick tests: under a minute on 2 cores.
check: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint quick

quick: $(READY)
	$(BIN)/python -m pytest -q $(addprefix tests/,$(QUICK))

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

setup: $(READY)

# The site, in site/. mkdocs has an environment of its own, which needs neither JAX nor .venv.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(READY): requirements.txt requirements-nodeps.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"{sys.executable} is Python {v.major}.{v.minor}; expected 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(call install,-r requirements.txt)
	$(call install,--no-deps -r requirements-nodeps.txt)
	$(call install,--no-deps --no-build-isolation --editable .)
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS) site

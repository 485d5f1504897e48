# Everything a reader, an instructor or CI needs is a target here: `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help book test test-fast test-remote lab serve doctor lint lock bench clean chromium

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sort | awk -F ':.*?## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with 'make PYTHON=python3.12 ...'."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "Could not make a virtual environment; on Debian: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --constraint requirements.lock torch
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	@touch $@

book: $(READY)  ## Run the chapters that changed and build the site into _build/html
	$(BIN)/gna build

test: book chromium  ## Run every test (builds the book first: its pages are tested in a browser)
	$(BIN)/python -m pytest

test-fast: $(READY)  ## Run the tests that take seconds
	$(BIN)/python -m pytest -m "not slow"

test-remote: $(READY)  ## Opt-in: test against a real NDIF server on this machine (downloads several GB once)
	$(BIN)/python tests/remote/run.py

lab: $(READY)  ## Open the chapters in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=book

serve: $(READY)  ## Show the built site on http://127.0.0.1:8000
	$(BIN)/gna serve

doctor: $(READY)  ## Print versions, devices and weights: paste it into an issue
	$(BIN)/gna doctor

lint: $(READY)  ## Check style and that no notebook holds outputs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify book/*.ipynb

bench: $(READY)  ## Measure the costs that the README states
	for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

lock:  ## Resolve all packages anew in an empty environment and write requirements.lock
	$(PYTHON) tests/lockfile.py > requirements.lock.tmp
	mv requirements.lock.tmp requirements.lock

# The browser tests drive Debian's Chromium; another one can be named by GNA_CHROMIUM.
chromium:
	@test -n "$$GNA_CHROMIUM" || command -v chromium >/dev/null || \
		{ test "$$(id -u)" = 0 && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
		{ echo "The browser tests need Chromium: sudo apt-get install chromium (or set GNA_CHROMIUM)."; exit 2; }

clean:  ## Remove what was built (the cache of weights stays)
	rm -rf _build

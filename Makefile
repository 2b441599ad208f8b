# `make test` after the README's second command; PYTHON names another environment.
PYTHON ?= .venv/bin/python

.PHONY: check test test-all bench figures

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

test:
	$(PYTHON) -m pytest

test-all:
	$(PYTHON) -m pytest -m ""

bench:
	$(PYTHON) benchmarks/bench.py

# every figure in the README and in docs/, by the commands that stand beside them there
figures:
	PATH="$(dir $(PYTHON)):$$PATH" sh docs/figures.sh

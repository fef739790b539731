PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One torch thread per worker: the workers are the parallelism.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench bench-expanded lint clean

help:
	@echo "make demo      train a small CNN on the digits, show and check its per-sample gradients"
	@echo "make test      lint, types and tests (what CI runs)"
	@echo "make test-all  the same with the slow tests"
	@echo "make bench     the benchmarks; make bench-expanded: against PyTorch's expanded weights"
	@echo "make lint      ruff and mypy only"
	@echo "make clean     remove .venv and all caches"

# The stamp is touched last, so an interrupted install is repeated and a finished one costs nothing.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,demo]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/digits.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m 'not slow'

test-all: lint
	$(PYTEST)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

bench-expanded: $(STAMP)
	$(BIN)/python -m benchmarks.expanded

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

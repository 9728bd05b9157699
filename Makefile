# Two commands on a fresh machine: `make quickstart` and `make test`. Each makes its own environment when there is none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test test-gpu lint bench clean

quickstart: $(STAMP)
	$(BIN)/compress quickstart

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests compress README.md docs

# Where there is a GPU; elsewhere every test is skipped with the reason.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -rs tests/test_gpu.py

# Quick versions, 20 minutes at the most on 2 cores; `python -m benchmarks.NAME` without --quick is what docs/results.md shows.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(if $(DATA),--data "$(DATA)")

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev,onnx,mmdet-lite,yolo]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Everything runs in .venv; `make setup` is stamped, so that a second call costs nothing.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
# pytest-xdist: two workers, each with one thread, or they fight over the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: setup demo test test-slow check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/hotloop train recipe=criteria

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not campaign" tests

test-slow: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m campaign tests

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/torch_private

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

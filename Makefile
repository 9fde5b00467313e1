# `make` alone lists the targets. Everything is installed into .venv with plain pip, nothing outside this folder changes.

# The first interpreter that really runs, is new enough and can make a virtual environment (`make PYTHON=... venv` overrides).
PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
RUN := $(BIN)/python -m
# one thread a test process (threads of several processes fight for the cores), no network, and small notebooks
TEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 WANDB_MODE=offline FL_ROUNDS=10 FL_POINTS=7 $(RUN) pytest --dist worksteal

# Python keeps what it compiles, so that each process need not compile it again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv lock dev flower-env demo test test-slow test-long test-all soak lint types format renew docs bench gpu clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1mmake %-10s\033[0m %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/.installed ## Make .venv with the package in it; with LOCKED=1 exactly the versions of .ci/requirements.lock
dev: $(VENV)/.installed-dev ## The same with all that tests, checks and documentation need

lock: ## Renew .ci/requirements.lock: pinned versions with their hashes, for all systems and Pythons
	@command -v uv >/dev/null || { echo "needs uv, see https://docs.astral.sh/uv" >&2; exit 1; }
	printf 'hatchling>=1.27\neditables\n' | uv pip compile pyproject.toml - --universal --python-version 3.11 --upgrade \
		--generate-hashes --no-emit-index-url --no-annotate --no-header --quiet --output-file .ci/requirements.lock

$(BIN)/pip:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then echo "no Python >= 3.11 with venv found; try: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV)

ifdef LOCKED
$(VENV)/.installed: pyproject.toml .ci/requirements.lock | $(BIN)/pip
	$(RUN) pip install --require-hashes -r .ci/requirements.lock
	$(RUN) pip install --no-deps --no-build-isolation -e .
	@touch $@
else
$(VENV)/.installed: pyproject.toml | $(BIN)/pip
	$(RUN) pip install -e .
	@touch $@
endif

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/pip
	$(RUN) pip install -e '.[dev]'
	@touch $(VENV)/.installed $@

# Flower pins old versions of what others need new: two small environments that find all else in the main one
flower-env: .venv-flower/.installed ## Make .venv-flower: Flower in its lowest and in its newest version, for the slow and the long tests

.venv-flower/.installed: pyproject.toml | $(VENV)/.installed-dev
	@for each in lowest newest; do $(RUN) venv --clear .venv-flower/$$each && $(BIN)/python -c \
		'import sys, sysconfig as s; p = s.get_path; print(p("purelib"), file=open(p("purelib", vars={"base": sys.argv[1]}) + "/main.pth", "w"))' \
		.venv-flower/$$each || exit 1; done
	.venv-flower/lowest/bin/python -m pip install --quiet -e '.[flower]' 'flwr==1.41.0'
	.venv-flower/newest/bin/python -m pip install --quiet -e '.[flower]' 'flwr[simulation]'
	@touch $@

demo: venv ## Train on a small data set that needs no download
	$(BIN)/fl-lightning fit --config configs/quickstart.yaml

test: dev ## Run the quick tests
	$(TEST) -n $(JOBS) -m "not slow" tests

test-slow: dev flower-env ## Run the slow tests and the notebooks
	$(TEST) -n $(JOBS) -m "slow and not long" --durations 40 --nbmake tests notebooks

test-long: dev flower-env ## Run what both leave out: every case of the tests with very many cases, the longest pages and runs
	$(TEST) -n $(JOBS) -m long --durations 40 tests

test-all: test test-slow test-long ## Run everything

soak: dev ## Kill runs and sweeps 500 times, and compare what they end with (an hour)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 WANDB_MODE=offline $(RUN) tests.soak

lint: dev ## Check style and formatting
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(BIN)/lint-imports

types: dev ## Check types
	MYPY_NUM_WORKERS=$(JOBS) $(RUN) mypy

format: dev ## Mend style and formatting where that can be done safely
	$(RUN) ruff check --fix
	$(RUN) ruff format

renew: dev ## Renew what files say of the code: index of the command line, tables, code and navigation of the pages
	$(RUN) tests.renew

docs: dev ## Build the documentation into site/
	$(RUN) nbconvert --to markdown --output-dir docs/notebooks --log-level WARN notebooks/*.ipynb
	$(RUN) zensical build --strict --clean

bench: venv ## Measure the engines and renew docs/benchmarks.md (a quarter of an hour)
	$(BIN)/python -m contest

gpu: venv ## Check a CUDA device, measure on it, train the papers' runs (half an hour; again to go on)
	@$(BIN)/python -m benchmarks.gpu correctness=300 speed=600 science=900 --report docs/guides/gpu.md

clean: ## Remove caches and built files (.venv, runs/ and data/ stay)
	rm -rf build dist site docs/notebooks .cache htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints -o -name '*.egg-info' \) -exec rm -rf {} +

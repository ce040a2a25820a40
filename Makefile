# Each target makes its own virtual environment first, so it is the only command you need.
#
#   make test ARGS="-k import_order"  hands ARGS to pytest
#   make test JOBS=0                  runs the tests in one process, one after the other; 3 by default
#   make test-all EXTRAS=test,torch,jax   installs torch and JAX too; without them their tests skip and say so
#   make frameworks test-all          the tests that ask training frameworks' own parsers run too
#   make run PYTHON=python3.12        builds .venv with another Python

PYTHON ?= python3
EXTRAS ?= test
ARGS ?=
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
STUDIES := configs/studies/llama3-8b-dgx-h100.yaml configs/studies/ultrascale-llama-8b-128.yaml

comma := ,
# $(call installed,test,dev) is the stamp of that set of extras: .venv/.installed-test+dev
installed = $(VENV)/.installed-$(subst $(comma),+,$(strip $(1)))
CORE := $(call installed,core)
CHOSEN := $(call installed,$(EXTRAS))
LINTERS := $(if $(filter dev,$(subst $(comma), ,$(EXTRAS))),$(CHOSEN),$(CHOSEN)+dev)

# The frameworks whose parsers read our exports, and what they import before they parse. Whole they would bring gigabytes
# of what only training needs, so pip is told to leave their dependencies alone. torchtitan's file of recipes imports
# its trainer and data loaders; deepspeed, nanotron and megatron-core need little. megatron-core declares Python 3.12, and
# has wheels for 3.11 that need one name of 3.12 (benchmarks/support/megatron_parser.py).
FRAMEWORKS := accelerate deepspeed megatron-core nanotron nemo-toolkit spmd-types torchtitan
THEIR_IMPORTS := dacite datasets einops hjson psutil py-cpuinfo tensorboard tokenizers torch torchdata tyro
# Only where torch has not brought its own. 3.3.1 is the smallest that torch 2.13 imports; no kernel runs here.
TRITON := triton==3.3.1

# Transformer Engine's Python code and what it imports, in a folder of its own: without the libraries of CUDA, its import
# fails for all who do not stand in for them, as rehearsals do (tuner/rehearsal/torch_room/frameworks/transformer_engine.py).
ENGINE := transformer-engine onnxscript onnx onnx-ir ml-dtypes

# XLA's compiler for GPUs, which needs none, in a folder of its own: beside JAX it would look for a GPU in every test.
COMPILER := jax-cuda12-pjrt jax-cuda12-plugin

# The quick lane: units that are not marked as slow, and one whole study on a local Ray; tests/conftest.py says it too.
QUICK := tests/unit tests/integration/ray/test_whole_study.py

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Test processes share the cores already: threads of torch and BLAS in each of them only wait for one another. Hundreds of
# processes import the same modules, and where bytecode is not written, each compiles them.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-rest test-all bench chaos fuzz docs frameworks lint format audit clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: $(CORE) ## tune two example studies, with no accelerator and no cluster
	@set -e; for study in $(STUDIES); do \
		echo "==> meshtune run $$study"; \
		$(BIN)/meshtune run "$$study"; \
	done

test: $(CHOSEN) ## run the quick tests: units, and one whole study on a local Ray
	@$(PYTEST) -m "not slow" $(QUICK) $(ARGS)

test-rest: $(CHOSEN) ## run the tests that `make test` leaves out
	@$(PYTEST) -m slow $(ARGS)

test-all: $(CHOSEN) ## run all tests
	@$(PYTEST) $(ARGS)

bench: $(CHOSEN) ## run the benchmarks of speed, one after the other
	@set -e; for bench in $(sort $(wildcard benchmarks/speed/*.py)); do \
		echo "==> $$bench"; \
		$(BIN)/python -m "benchmarks.speed.$$(basename "$$bench" .py)"; \
	done

# As root it mounts a small disk of its own to fill, and leaves that out otherwise.
chaos: $(CHOSEN) ## disturb studies at random for half an hour, and check what must hold
	@$(BIN)/python -m tests.chaos --rounds 1000 --seconds 1800 $(ARGS)

fuzz: $(call installed,test$(comma)fuzz) ## feed changed inputs to everything that reads files or options
	@$(BIN)/python -m benchmarks.endurance.fuzz $(ARGS)

docs: $(call installed,docs) ## build the documentation as a site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html; its search needs a server: $(BIN)/python -m http.server -d build/site"

frameworks: $(VENV)/.frameworks ## install training frameworks, as far as their parsers need

lint: $(LINTERS) ## check style, format and types
	@echo "==> ruff check"; $(BIN)/ruff check
	@echo "==> ruff format --check"; $(BIN)/ruff format --check
	@echo "==> mypy"; $(BIN)/mypy

format: $(LINTERS) ## put the code into the house format
	@$(BIN)/ruff check --fix --exit-zero --quiet
	@$(BIN)/ruff format

audit: $(CHOSEN) ## ask pypi.org for known weaknesses of what is installed; says so if it cannot be asked
	@$(BIN)/python .ci/audit.py

clean: ## remove .venv, caches and build products; studies' databases stay
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# The stamp is touched last: an environment that was interrupted half-way is made again from the start.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: '$(PYTHON)' was not found; install Python 3.11 or later, or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: Meshtune needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
			"install a newer one, or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu install the package python3-venv first" >&2; exit 1; }
	@touch $@

# One stamp per set of extras, so that a later target adds only what is missing.
# The constraints hold for everybody: a newcomer gets the versions that were tested.
$(VENV)/.installed-%: $(VENV)/.created pyproject.toml constraints.txt
	@echo "==> installing meshtune ($(subst +,$(comma) ,$*)) into $(VENV); the first time takes a few minutes"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.$(if $(filter-out core,$*),[$(subst +,$(comma),$*)])'
	@touch $(CORE) $@

$(VENV)/.frameworks: $(VENV)/.created Makefile constraints.txt | $(CHOSEN)
	@echo "==> installing the parsers of $(FRAMEWORKS) into $(VENV)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt $(THEIR_IMPORTS)
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --ignore-requires-python $(FRAMEWORKS)
	@rm -rf $(VENV)/lib/python3*/site-packages/tests # nemo-toolkit brings a package of that name, which would hide ours
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps $(TRITON)
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target $(VENV)/transformer-engine $(ENGINE)
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target $(VENV)/gpu-compiler $(COMPILER) || \
		echo "make: $(COMPILER) could not be installed; tests that compile for GPUs skip" >&2
	@touch $@

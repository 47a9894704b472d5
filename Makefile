# Needs Linux x86-64, make and Python 3.11 with pip; `make help` lists targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

# The interpreter that creates .venv: PYTHON if given, else the first of these
# that is a Python 3.11.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3.11 python3 python)
# Extra arguments: make test PYTEST_ARGS='-n 0 -k name', make demo DEMO_ARGS=...
# make lock LOCK_ARGS=--upgrade
PYTEST_ARGS ?=
DEMO_ARGS ?=
LOCK_ARGS ?=
# make chaos CHAOS_MINUTES=10 CHAOS_SEED=3
CHAOS_MINUTES ?= 60
CHAOS_SEED ?= 0

VENV := .venv
LOCK := requirements/lock.txt
GPU_LOCK := requirements/gpu.txt
# Of the documentation alone, which needs nothing of the package's own lock.
DOCS_LOCK := requirements/docs.txt
DOCS_VENV := .venv-docs
# The lock that .venv was built from. Copied only once everything is installed.
STAMP := $(VENV)/.installed-lock.txt
RUN := $(VENV)/bin/python

UV_VERSION := 0.13.7
UV_VENV := .venv-lock
UV_STAMP := $(UV_VENV)/.uv-$(UV_VERSION)
UV_COMPILE := $(UV_VENV)/bin/uv pip compile --quiet --generate-hashes \
	--python-version 3.11 --python-platform x86_64-manylinux_2_31 \
	--custom-compile-command 'make lock'

# TensorFlow logs three harmless errors at start when there is no GPU.
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON

# All three are evaluated only where they are used. `-I` shields the checks from
# the user's PYTHON* variables, which $(shell) still sees.
is_311 = $(shell $(1) -I -c 'import sys; print(*sys.version_info[:2])' \
	2>/dev/null | grep -x '3 11')
FOUND_PYTHON = $(or $(firstword \
	$(foreach p,$(PYTHONS),$(if $(call is_311,$(p)),$(p)))),$(error \
	no Python 3.11 found (tried: $(PYTHONS)); set PYTHON=/path/to/python3.11))
VENV_IS_CURRENT = $(and \
	$(shell cmp -s $(LOCK) $(STAMP) && echo yes),$(call is_311,$(RUN)))

.PHONY: help
help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' \
	  $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: venv  ## Run the demonstration.
	@$(RUN) -m experiments.hyper_representation \
	  --flagfile=experiments/presets/demo.flags $(DEMO_ARGS)

.PHONY: test
test: venv  ## Run the tests without the mark `long`; PYTEST_ARGS is passed on.
	@$(RUN) -m pytest -m 'not long' $(PYTEST_ARGS)

.PHONY: test-long
test-long: venv  ## Run the other tests: with the mark `long`.
	@$(RUN) -m pytest -m long $(PYTEST_ARGS)

.PHONY: test-quick
test-quick: venv  ## Run the tests without the mark `slow`.
	@$(RUN) -m pytest -m 'not slow' $(PYTEST_ARGS)

.PHONY: chaos
chaos: venv  ## Kill, damage and misuse runs for CHAOS_MINUTES.
	@$(RUN) -m tests.chaos --minutes=$(CHAOS_MINUTES) --seed=$(CHAOS_SEED)

.PHONY: lint
lint: venv  ## Check the code with ruff and mypy, and the links of the pages.
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy --no-error-summary
	@$(RUN) docs/links.py

# Rebuilt when the lock's content differs from the stamp's. setuptools and wheel
# go first, so that the few packages without a wheel are built with the locked
# ones rather than with whatever is newest.
define BUILD_VENV
python=$(FOUND_PYTHON); \
echo 'Installing $(LOCK) into $(VENV) (a minute or two) ...'; \
tmp=$$(mktemp -d) || exit 1; \
trap 'rm -rf "$$tmp"' EXIT; \
trap 'exit 130' INT TERM HUP; \
cp $(LOCK) "$$tmp/lock.txt" \
&& awk '/^[^ #]/ {on = /^(setuptools|wheel)==/} on' "$$tmp/lock.txt" \
  >"$$tmp/build.txt" \
&& { rm -rf $(VENV) \
  && "$$python" -m venv $(VENV) \
  && $(RUN) -m pip install --no-deps --require-hashes -r "$$tmp/build.txt" \
  && $(RUN) -m pip install --no-deps --require-hashes --no-build-isolation \
    --use-pep517 -r "$$tmp/lock.txt" \
  && $(RUN) -m pip install --no-deps --no-build-isolation --editable . \
  && cp "$$tmp/lock.txt" $(STAMP).new && mv $(STAMP).new $(STAMP); \
} >"$$tmp/log.txt" 2>&1 \
|| { tail -n 30 "$$tmp/log.txt" >&2; \
  echo 'error: could not set up $(VENV); the end of its log is above' >&2; \
  exit 1; }
endef

.PHONY: venv
venv:  ## Create .venv from the lock, unless it is there and current.
	@$(if $(VENV_IS_CURRENT),:,$(BUILD_VENV))

.PHONY: flags
flags: venv  ## Write experiments/flags.json, after a change of any flag.
	@$(RUN) -m experiments.flags

.PHONY: docs
docs: docs-venv  ## Build the documentation as a web site in site/.
	@$(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet
	@echo 'The documentation is in site/index.html.'

.PHONY: docs-venv
docs-venv:
	@cmp -s $(DOCS_LOCK) $(DOCS_VENV)/.installed-lock.txt || { \
	  echo 'Installing $(DOCS_LOCK) into $(DOCS_VENV) ...'; \
	  rm -rf $(DOCS_VENV) && $(FOUND_PYTHON) -m venv $(DOCS_VENV) \
	  && $(DOCS_VENV)/bin/python -m pip install --quiet --no-deps \
	    --require-hashes -r $(DOCS_LOCK) \
	  && cp $(DOCS_LOCK) $(DOCS_VENV)/.installed-lock.txt; }

.PHONY: lock
lock:  ## Regenerate both locks; LOCK_ARGS=--upgrade takes newer releases.
	@[ -e $(UV_STAMP) ] || { \
	  rm -rf $(UV_VENV) && $(FOUND_PYTHON) -m venv $(UV_VENV) \
	  && $(UV_VENV)/bin/python -m pip install --quiet uv==$(UV_VERSION) \
	  && touch $(UV_STAMP); }
	$(UV_COMPILE) $(LOCK_ARGS) --extra dev -o $(LOCK) pyproject.toml
	$(UV_COMPILE) $(LOCK_ARGS) --no-deps -o $(GPU_LOCK) requirements/gpu.in
	$(UV_COMPILE) $(LOCK_ARGS) -o $(DOCS_LOCK) requirements/docs.in

.PHONY: clean
clean:  ## Remove the environments and caches (not outputs/).
	rm -rf $(VENV) $(UV_VENV) $(DOCS_VENV) site .hypothesis .mypy_cache .pytest_cache .ruff_cache \
	  build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two commands for a fresh clone: `make demo` and `make test`. Each sets up .venv first, once.
#
#   PYTHON=python3.12     another interpreter (3.11 or newer)
#   PIP_ARGS='...'        more arguments for every pip install, such as an index to use
#   ARGS='...'            arguments for the example or for pytest

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

# torch builds the allocator with ninja, which pip puts here.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test check clean

demo: $(INSTALLED)
	$(BIN)/python examples/train_resnet18.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 $(ARGS) tests

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

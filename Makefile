# Every target makes the virtual environment that it needs; only Python >= 3.11, with venv, is
# taken for granted. Choose another one with `make PYTHON=python3.12 …`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help demo test dashboards lint format test-matrix clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## Watch agents being held to their limits; ARGS="--seconds 60" passes arguments.
	@$(BIN)/langchain-quota demo $(ARGS)

test: $(VENV)/.develop ## Run all tests; ARGS="-k stacked" passes arguments to pytest.
	@$(BIN)/pytest $(ARGS)

dashboards: $(VENV)/.develop ## Generate the Grafana dashboards and the alert rules anew.
	@$(BIN)/python -m dashboards.build
	@$(BIN)/langchain-quota export prometheus --to dashboards/prometheus --force
	@$(BIN)/langchain-quota export prometheus --to dashboards/prometheus/tests --per-thread-alerts --force
	@$(BIN)/langchain-quota export alertmanager --to dashboards/alertmanager --force

lint: $(VENV)/.develop ## Check style and types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.develop ## Mend what can be mended of the style.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-matrix: ## Run unit and agent tests on every Python found, and oldest and newest langchain.
	@$(PYTHON) tests/matrix.py

clean: ## Remove virtual environments and caches.
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Python 3.11 or newer is needed: install it, or run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python's venv is needed: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo "Making $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/.develop: $(VENV)/.python pyproject.toml constraints.txt
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[demo]' --group test --group lint
	@touch $@ $(VENV)/.demo

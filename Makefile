# Every target makes the virtual environment that it needs; only Python >= 3.11, with venv, is
# taken for granted. Choose another one with `make PYTHON=python3.12 …`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help demo up down test test-all explore traffic docker-test stack-test kubernetes-test pin-images dashboards bench soak lint format test-matrix picture docs docs-serve coverage compare mutants dist langchain-tests langgraph-server audit instructions clean

DOCKER ?= docker
ENV_FILE ?= docker/.env
# Without the theme's notice about its successor. Not --quiet: with it --strict sees no warnings.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
COMPOSE = $(DOCKER) compose --file docker/compose.yaml --env-file $(ENV_FILE)

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.demo ## Watch agents being held to their limits; ARGS="--seconds 60" passes arguments.
	@# Ctrl-C is no error.
	@trap : INT; $(BIN)/langchain-quota demo $(ARGS) || [ $$? = 130 ]

up: ## Start the whole stack in Docker: agents, dashboards, alerts, traces.
	@$(needs_docker)
	@$(MAKE) --silent --no-print-directory $(ENV_FILE)
	@DOCKER=$(DOCKER) bash docker/up.sh $(ENV_FILE)

down: ## Stop the stack; ARGS=--volumes forgets what it has stored.
	@$(needs_docker)
	@$(MAKE) --silent --no-print-directory $(ENV_FILE)
	@# Volumes without a name, which images may ask for, go with their containers.
	@$(COMPOSE) rm --stop --force --volumes
	@$(COMPOSE) down $(ARGS)

test: $(VENV)/.develop ## Run the tests that need no server; ARGS="-k stacked" passes arguments to pytest.
	@$(BIN)/pytest -m "not rest" $(ARGS)

test-all: $(VENV)/.develop ## Run what `make test` leaves out: servers, kills, terminals, random agents in depth.
	@PROPERTIES=deep $(BIN)/pytest -m "rest or hypothesis" $(ARGS)

explore: $(VENV)/.develop ## Play random agents and stores that nobody has played; a find becomes an example.
	@PROPERTIES=explore $(BIN)/pytest -m hypothesis $(ARGS)

traffic: $(VENV)/.develop ## Simulate a service, with Prometheus and Alertmanager; ARGS="--profile loop".
	@$(BIN)/python -m benchmarks.traffic $(ARGS)

ifeq ($(CI),true)
test-all: .venv-langgraph/.server
docs: $(VENV)/.develop # for the tests of the site
endif

langgraph-server: .venv-langgraph/.server ## Install LangGraph's own server, which one test needs; CI=true does it.

docker-test: ## Build the service's image and try it, if there is a Docker engine; BASE_IMAGE=….
	@DOCKER=$(DOCKER) BASE_IMAGE=$(BASE_IMAGE) bash docker/test.sh $(ARGS)

stack-test: ## Start the whole stack in every way, and break it, if there is a Docker engine.
	@DOCKER=$(DOCKER) $(PYTHON) docker/stack_test.py

# Go checks the program's sources against its public log of checksums. The custom resources' schemas are
# those of a commit.
KUBECONFORM = go run github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0
SCHEMAS = https://raw.githubusercontent.com/datreeio/CRDs-catalog/7b1e26ef9deea49293714d204c1a2270aab1178f

kubernetes-test: $(VENV)/.develop ## Check what `export kubernetes` writes, with kubectl, Go and the network.
	@to=$$(mktemp -d) && trap 'rm -rf "$$to"' EXIT && set -o pipefail && \
	$(BIN)/langchain-quota export kubernetes --to $$to --grafana-url https://grafana.example.org >/dev/null && \
	kubectl kustomize $$to | $(KUBECONFORM) -strict -summary -schema-location default \
		-schema-location '$(SCHEMAS)/{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json' -

pin-images: $(VENV)/.python ## Add to the images in docker/ the digests that their registries name, with Docker's buildx.
	@$(BIN)/python -m tools.pin_images

dashboards: $(VENV)/.develop ## Write the Grafana dashboards and the stack's alert rules anew.
	@$(BIN)/python -m dashboards.build
	@$(BIN)/langchain-quota export prometheus --to dashboards/prometheus --force

bench: $(VENV)/.develop ## Measure beside LangChain's limiters, and write benchmarks/report.md; ARGS=--quick to try.
	@$(BIN)/python -m benchmarks $(ARGS)

soak: $(VENV)/.develop ## Run agents for half an hour, and fail if anything grows; ARGS="--minutes 5" for less.
	@$(BIN)/python -m benchmarks.soak $(ARGS)

picture: $(VENV)/.develop ## Draw the page for the docs anew, in Chromium; ARGS="--grafana URL" draws the dashboards.
	@$(BIN)/python -m tools.picture $(ARGS)

# Tests are read, too: a new one that needs more lines replaces one that finds less.
TESTS_AT_MOST = 33400

lint: $(VENV)/.develop ## Check style, types and spelling.
	@lines=$$(git ls-files -z 'tests/*.py' | xargs -0 cat | wc -l); [ $$lines -le $(TESTS_AT_MOST) ] || \
		{ echo "tests/ has $$lines lines of Python, and $(TESTS_AT_MOST) are the most: take some away"; exit 1; }
	$(BIN)/ruff check
	$(BIN)/ruff check --preview --select DOC102,DOC202,DOC403,DOC501 src
	$(BIN)/ruff format --check
	@git ls-files -z | xargs -0 $(BIN)/codespell
	$(BIN)/mypy
	@for page in README.md docs/quickstart.md docs/limits.md docs/people.md; do \
		$(BIN)/mypy --config-file= --strict -c "$$(sed -n '/^```python$$/,/^```$$/{/^```/!p}' $$page)" \
		|| { echo "in the Python of $$page"; exit 1; }; done
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	@# Workflows: what GitHub would refuse, and what an attacker could use.
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet --persona pedantic .github

format: $(VENV)/.develop ## Fix the style where that can be done automatically.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-matrix: $(VENV)/.matrix ## Run the tests of the package on every Python found, and oldest and newest langchain; ARGS="-- -k trial".
	@$(BIN)/nox --envdir .venv-nox $(ARGS)

audit: $(VENV)/.develop ## Look the pinned packages up in PyPI's list of vulnerabilities, which needs the network.
	@$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# No part of .ci/run: a change may be meant to differ.
compare: $(VENV)/.develop ## Play random agents as the commit AGAINST=… and as the working tree, and list what differs.
	@$(BIN)/python -m tools.compare $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

instructions: $(VENV)/.develop ## Count the instructions of key paths with valgrind; AGAINST=main compares.
	@$(BIN)/python -m benchmarks.instructions $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

langchain-tests: $(VENV)/.develop ## Run LangChain's own tests of its limiters on the drop-ins.
	@$(BIN)/python tools/upstream.py

docs: $(VENV)/.docs ## Build the documentation into site/; a dead link fails, and a search that finds nothing.
	@$(MKDOCS) build --strict
	@! [ -x $(BIN)/pytest ] || $(BIN)/pytest -q -n0 tests/docs/test_search.py

docs-serve: $(VENV)/.docs ## Show the documentation on http://localhost:8000 while you write it.
	@$(MKDOCS) serve $(ARGS)

coverage: $(VENV)/.develop ## Run all tests, and show the lines of the package that none of them runs.
	@$(BIN)/pytest --cov --cov-report=term $(ARGS)

mutants: $(VENV)/.develop ## Plant the faults that tests must find; ARGS="--diff main" plants mutants of a change.
	@$(BIN)/python -m tools.mutants $(ARGS)

dist: $(VENV)/.dist ## Build sdist and wheel into dist/, and try them as the README says.
	rm -rf dist
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build
	@$(BIN)/twine check --strict dist/*
	@# The dashboards come from another folder.
	@$(BIN)/check-wheel-contents --ignore W102 --package src/langchain_quota dist/*.whl
	@$(BIN)/python tools/dist.py

clean: ## Remove virtual environments, caches and what was built.
	rm -rf .venv .venv-* .coverage* dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

define needs_docker
$(DOCKER) compose version >/dev/null 2>&1 || \
	{ echo "Docker with Compose is needed: https://docs.docker.com/get-started/get-docker/"; exit 1; }; \
$(DOCKER) info >/dev/null 2>&1 || \
	{ echo "Docker does not answer: is its engine running, and may you use it?"; exit 1; }
endef

# Made once, with secrets of its own.
$(ENV_FILE):
	@umask 077; secret() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }; \
	sed -e "s/^METRICS_TOKEN=$$/&$$(secret)/" -e "s/^POSTGRES_PASSWORD=$$/&$$(secret)/" \
		-e "s/^REDIS_PASSWORD=$$/&$$(secret)/" docker/.env.example > $@

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Python 3.11 or newer is needed: install it, or run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python's venv is needed: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo "Making $(VENV): some seconds …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing the demo into $(VENV): a minute or two, only once …"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable .
	@touch $@

$(VENV)/.docs: $(VENV)/.python pyproject.toml constraints.txt
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable . --group docs
	@touch $@

$(VENV)/.dist: $(VENV)/.python pyproject.toml constraints.txt
	@$(BIN)/python -m pip install --quiet -c constraints.txt --group dist
	@touch $@

$(VENV)/.matrix: $(VENV)/.python pyproject.toml constraints.txt
	@$(BIN)/python -m pip install --quiet -c constraints.txt --group matrix
	@touch $@

# In an environment of its own: it needs older packages than ours.
.venv-langgraph/.server: $(VENV)/.python pyproject.toml
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	@$(@D)/bin/python -m pip install --quiet --editable '.[redis]' --group langgraph-server
	@touch $@

$(VENV)/.develop: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing what tests and checks need into $(VENV): some minutes, only once …"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[otlp]' --group test --group lint
	@touch $@ $(VENV)/.demo

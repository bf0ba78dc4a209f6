# `make help` lists the targets. Everything runs from .venv, which the first target that needs it builds.

PYTHON ?= python3
# Another package index for torch, e.g. https://download.pytorch.org/whl/cpu; empty: pip's own configuration.
TORCH_INDEX ?=

TORCH := $(shell grep '^torch==' constraints.txt)
PIP := .venv/bin/python -m pip --disable-pip-version-check
# One intra-op thread: tests run beside each other, and results must not depend on the number of cores. Bytecode is
# written, or each of the many processes would compile every module again.
RUN := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST_ARGS := -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
PYTEST := $(RUN) .venv/bin/python $(PYTEST_ARGS)

# Other versions of torch that `make test-versions` tests, each in an environment of its own, and what runs on each.
VERSIONS ?= 2.11.0 2.12.1 2.14.1 2.15.0
VERSION_TESTS ?= tests/torch_compat tests/test_import.py tests/capture tests/strategies/test_rules.py tests/verify \
  $(addprefix tests/distributed/test_,changes.py microbatches.py staged_tensors.py whole_operators.py)

.DEFAULT_GOAL := help
.PHONY: help .venv links demo test tests test-slow test-deep test-models test-versions lint style types format bench docs

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "%-13s %s\n", $$1, $$2 }' Makefile

.venv: .venv/.stamp ## build the virtual environment (again, when pyproject.toml or constraints.txt changed)

# torch comes first and pinned, so that no later step can pull in a CUDA build.
.venv/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopar needs Python 3.11; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

# Libraries of models, which must not touch the torch that is there.
.venv/.models: .venv/.stamp constraints-models.txt
	$(PIP) install -q --no-deps -r constraints-models.txt
	@touch $@

links:
	@for name in passes strategies; do \
	  [ -L autopar/$$name ] || { echo "autopar/$$name must be a link to ../$$name: ln -sfn ../$$name autopar/$$name" >&2; exit 1; }; \
	done

demo: .venv ## plan, rewrite and check a small model on one machine
	.venv/bin/python -m autopar.cli.demo

test: style ## set-up, lint, types and the tests (what the CI runs)
	@$(MAKE) --no-print-directory -j 2 types tests

# Without a cache mypy takes most of a minute on one core: it runs beside the tests.
types: .venv
	.venv/bin/mypy

tests: .venv
	$(PYTEST) -m "not deep and not slow"

test-slow: .venv ## the tests of `make test`, and those that take longer
	$(PYTEST) -m "not deep"

test-deep: lint .venv/.models ## the same with the deep tests and 2000 examples per property
	$(PYTEST) -m "deep or not deep" --hypothesis-profile=deep

test-models: .venv/.models ## networks of timm, diffusers and PEFT: planned, verified and trained on 4 processes
	$(PYTEST) -m "deep or not deep" tests/real_models

# All that constraints.txt pins but torch.
build/torch-%/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/torch-$*
	grep -v '^torch==' constraints.txt > build/torch-$*/constraints.txt
	build/torch-$*/bin/python -m pip --disable-pip-version-check install -q -c build/torch-$*/constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) 'torch==$*' -e '.[dev]'
	@touch $@

test-versions: $(VERSIONS:%=build/torch-%/.stamp) ## contract tests and some others on each torch of VERSIONS="2.11.0 2.15.0"
	@failed=; for version in $(VERSIONS); do \
	  echo "== torch $$version"; \
	  $(RUN) build/torch-$$version/bin/python $(PYTEST_ARGS) -m "not deep" $(VERSION_TESTS) || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "failed with torch$$failed" >&2; exit 1; }

lint: style types ## ruff, formatting and mypy, changing nothing

style: .venv links
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv ## rewrite the sources with ruff's fixes and formatting
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# Of its own: what builds the site must not touch what autopar runs with.
.venv/.docs: .venv/.stamp constraints-docs.txt
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip --disable-pip-version-check install -q -r constraints-docs.txt
	@touch $@

docs: .venv/.docs ## the documentation as a site, in build/site/index.html
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict

bench: .venv ## run every benchmark
	@for file in $(wildcard benchmarks/*.py); do echo "== $$file"; .venv/bin/python $$file || exit 1; done

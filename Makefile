# Every target sets itself up in .venv on first use: packages, and a Java runtime if the machine has none.
PYTHON ?= python3
SEED ?= 1
# More workers than cores (we assume two), because a test that waits for Spark, a lease or a store uses no processor.
WORKERS ?= 3
# How long `make soak` fuzzes each target.
FUZZ_SECONDS ?= 3600
VENV := $(CURDIR)/.venv
BOOTSTRAP := $(PYTHON) scripts/bootstrap.py --venv $(VENV)
IN_VENV := . $(VENV)/env.sh &&

.DEFAULT_GOAL := help
.PHONY: help check types units test soak lint format demo matrix venv clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Quick tests of decisions and formats, and of the adapter without Spark.
UNITS := tests/test_rooms.py tests/test_glossary.py tests/adapter $(addprefix tests/core/test_,$(addsuffix .py,columns commit compaction evolution formats lineage row_equality search spark_types state_batch state_batch_changes tables))

check: ## lint, types and quick tests without Spark, for every change
	@$(BOOTSTRAP) --extras demo,test,lint
	@$(IN_VENV) python -m ruff check .
	@$(IN_VENV) python -m ruff format --check .
	@$(MAKE) -s -j 2 types units

# mypy uses one core and has no cache in a fresh clone, so `check` runs both at once.
types:
	@$(IN_VENV) python -m mypy

units:
	@$(IN_VENV) python -m pytest -n 2 --max-worker-restart=0 -q $(UNITS)

# If a worker process ends, the run ends too and names the test: if xdist replaced the worker, groups of tests would wait forever.
test: ## lint, types and the whole test suite (TESTS="..." passes arguments to pytest)
	@$(BOOTSTRAP) --extras demo,test,lint
	@$(IN_VENV) python -m ruff check .
	@$(IN_VENV) python -m ruff format --check .
	@$(IN_VENV) python -m mypy
	@$(IN_VENV) python scripts/run_tests.py --budget pyproject.toml -n $(WORKERS) --dist loadgroup --max-worker-restart=0 -m "not parity" $(TESTS)

soak: ## long forms, which take a day or two: all cases of all tests, 20,000 histories of each kind (buckets, leases, claims, savepoints, erase requests, rescaling, epochs, standbys), two drivers on each store, savepoints in all ways and under kills, sampling under kills, runs and random failovers on a cluster, fuzzing, and the matrix
	@$(BOOTSTRAP) --extras demo,test,lint
	@$(IN_VENV) SPARK_STATE_EXT_SOAK=1 python -m pytest -n 2 --dist loadgroup --max-worker-restart=0
	@$(IN_VENV) python tests/simulation/run.py --histories 20000 --seed $(SEED)
	@$(IN_VENV) PYTHONPATH=.:tests/core python tests/chaos/two_drivers.py --seconds 600
	@$(IN_VENV) PYTHONPATH=.:tests/spark python tests/chaos/savepoints_under_kills.py --seconds 120
	@$(IN_VENV) PYTHONPATH=. python tests/cluster/cluster_runs.py --runs 20
	@$(IN_VENV) PYTHONPATH=. python tests/cluster/cluster_runs.py --runs 10 --long --cores 2
	@$(IN_VENV) PYTHONPATH=. python tests/cluster/random_failover.py --minutes 15 --seed $(SEED)
	@rm -rf .soak
	@$(IN_VENV) PYTHONPATH=. python tests/spark/sample_job.py .soak --timeouts processing --format 1 --restarts 500 --kills 100
	@$(IN_VENV) PYTHONPATH=.:tests/core:tests/cluster python tests/spark/savepoint_runs.py
	@$(IN_VENV) python tests/fuzz/fuzz.py all --seconds $(FUZZ_SECONDS)
	@$(PYTHON) scripts/matrix.py

lint: ## ruff and mypy only
	@$(BOOTSTRAP) --extras demo,test,lint
	@$(IN_VENV) python -m ruff check .
	@$(IN_VENV) python -m ruff format --check .
	@$(IN_VENV) python -m mypy

format: ## rewrite the sources in the house style
	@$(BOOTSTRAP) --extras demo,test,lint
	@$(IN_VENV) python -m ruff check --fix .
	@$(IN_VENV) python -m ruff format .

demo: ## a year of flights through a stateful stream that is killed half-way (DEMO="..." passes arguments)
	@$(BOOTSTRAP) --extras demo
	@$(IN_VENV) python -m benchmarks.demo --work-dir .demo $(DEMO)

matrix: ## check the corners of the supported versions (MATRIX="..." passes arguments)
	@$(PYTHON) scripts/matrix.py $(MATRIX)

venv: ## set up .venv only
	@$(BOOTSTRAP) --extras demo,test,lint

clean: ## remove environments, caches, built packages and the demo's files
	rm -rf .venv .matrix .demo .soak build dist ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse artifacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

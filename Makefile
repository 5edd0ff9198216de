# Every target makes what it needs: a virtual environment in .venv, tools and clusters under build/ and the
# user's cache. Nothing is installed system-wide. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PROFILE ?= node
NAME ?= dev
CLUSTER ?= devcluster
INSTANCES := build/devcluster/instances
DEVCLUSTER := build/devcluster/bin/devcluster
# PINNED=0 takes the newest version of everything instead of those in deploy/constraints.txt.
PINNED ?= 1
# pytest arguments, for example: make test ARGS="tests/runtime -k resume"
ARGS ?=
# Test processes, each with files of its own; twice the cores, as ranks and clusters mostly wait. WORKERS=0 is one
# process with everything.
WORKERS ?= 4

.PHONY: help demo check test test-all test-hf gpu-check lint bench bench-offload bench-operator bench-suspend chaos images monitoring-up monitoring-down cluster-up cluster-down clean generate venv upgrade
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Edited Python files are used as they are; packaging, kernels and a changed list of modules reinstall.
NATIVE_SOURCES := $(shell find csrc -type f)
MODULES := $(shell find operator runtime -name '*.py' | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
CONSTRAINTS := deploy/constraints.txt
PINS := $(if $(filter 0,$(PINNED)),newest,pinned)
# Build requirements are installed apart, so that they are constrained apart.
PIP_VERSIONS := $(if $(filter newest,$(PINS)),--upgrade --upgrade-strategy eager,--constraint $(CONSTRAINTS) --build-constraint $(CONSTRAINTS))
INSTALLED := $(VENV)/.installed-$(PINS)-$(MODULES)
venv: $(INSTALLED) ## the virtual environment, with the versions of deploy/constraints.txt (PINNED=0: the newest)
$(INSTALLED): pyproject.toml $(CONSTRAINTS) $(NATIVE_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit("zerotrain needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Give another with: make PYTHON=/path/to/python3.12") if sys.version_info < (3, 11) else None'
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "zerotrain needs a C++ compiler (Debian: apt-get install g++)" >&2; exit 1; }
	@echo "==> virtual environment in $(VENV), $(PINS) versions (torch and the rest from the package index: some minutes the first time)"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { echo "$(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	$(PY) -m pip install --quiet --upgrade pip $(if $(filter pinned,$(PINS)),--constraint $(CONSTRAINTS))
	$(PY) -m pip install --progress-bar off $(PIP_VERSIONS) --editable '.[dev]'
	$(PY) -c 'import zerotrain.contract, zerotrain.runtime, zerotrain.operator, torch; print("==> installed, torch", torch.__version__)'
	@rm -f $(VENV)/.installed-* && touch $@

upgrade: ## move deploy/constraints.txt and the images' requirements to the newest versions
	$(PYTHON) -m venv --clear build/upgrade
	build/upgrade/bin/python -m pip install --quiet uv
	UV=build/upgrade/bin/uv deploy/upgrade.sh
	rm -rf build/upgrade

# Files of tests are compiled once, also where Python is told to keep nothing compiled: pytest rewrites their
# assertions, which takes each process ten seconds.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The linters' words come after the tests', whichever ends first. Unit tests wait for nothing but the processor.
check: WORKERS = 2
check: venv ## format, lint, types and the unit tests (ARGS="tests/cli")
	@mkdir -p build; $(MAKE) --no-print-directory lint > build/lint.log 2>&1 & lint=$$!; failed=0; \
	$(PYTEST) --max-worker-restart 0 -m "unit and not slow" $(ARGS) || failed=1; \
	wait $$lint || failed=1; cat build/lint.log; exit $$failed

test: venv ## the tests, but for slow ones and those that need tools
	$(PYTEST) -m "not tools and not slow" $(ARGS)

test-all: venv ## every test (CI runs them, the slow ones last)
	$(PYTEST) $(ARGS)

test-hf: venv ## every script of Hugging Face's libraries and Lightning in every tier, beside DDP
	ZEROTRAIN_TEST_EXAMPLES=all $(PYTEST) tests/huggingface $(ARGS)

gpu-check: venv ## the engine on an NVIDIA GPU: steps, memory, kernels, tests (CI runs what needs none)
	$(PY) -m tests.gpu $(ARGS)

lint: venv ## ruff, mypy --strict, import-linter: each of them, whatever the others say
	@failed=0; for each in "ruff format --check ." "ruff check ." lint-imports mypy; do \
		echo "$(VENV)/bin/$$each"; $(VENV)/bin/$$each || failed=1; \
	done; exit $$failed

demo: venv ## the main job: a cluster, the operator, a ZeRO-3 training that survives a kill
	$(PY) -m deploy.demo --cluster $(CLUSTER)

bench: venv ## the benchmarks of tests/benchmarks (long; not part of CI)
	$(PY) -m tests.benchmarks.bench_small_params
	$(PY) -m tests.benchmarks.bench_step $(ARGS)
	$(PY) -m tests.benchmarks.bench_scripts

bench-offload: venv ## the benchmarks of offloading: update kernel, spill file, just-in-time step, whole steps
	$(PY) -m tests.benchmarks.bench_cpu_adam
	$(PY) -m tests.benchmarks.bench_spill
	$(PY) -m tests.benchmarks.bench_just_in_time
	$(PY) -m tests.benchmarks.bench_offload $(ARGS)

bench-operator: venv ## the operator beside plain Jobs on simulated nodes: speed, requests, memory (ARGS=--quick)
	$(PY) -m tests.benchmarks.bench_operator $(ARGS)

bench-suspend: venv ## 200 suspends, 20 of them with the real engine: is every checkpoint durable (ARGS="--real 0")
	$(PY) -m tests.benchmarks.suspend_cycles $(ARGS)

SEED ?= 1
N ?= 1000
chaos: venv ## kill the operator again and again in bad weather, and judge every version of every object (SEED=1 N=1000)
	$(PY) -m tests.cluster.chaos --seed $(SEED) --crashes $(N)

images: venv ## build both images with buildah and run them on the development cluster; torch as pip's settings give it
	ZEROTRAIN_TEST_IMAGES=all $(PY) -m pytest tests/images $(ARGS)

monitoring-up: venv ## Prometheus and Alertmanager beside a development cluster (NAME=dev)
	$(PY) -m deploy.monitoring up --name $(NAME)

monitoring-down: ## stop them
	$(PY) -m deploy.monitoring down --name $(NAME)

cluster-up: venv ## start a development cluster (PROFILE=control-plane|node|simulated NAME=dev)
	$(PY) -m deploy.devcluster up --profile $(PROFILE) --name $(NAME) --cluster $(CLUSTER)

cluster-down: ## stop it
	@if [ $(CLUSTER) = kind ]; then kind delete cluster --name $(NAME); elif [ -x $(DEVCLUSTER) ]; then $(DEVCLUSTER) down --name $(NAME) --root $(INSTANCES); else echo "no development cluster was built here"; fi

generate: venv ## regenerate CRDs, dashboards, the chart's parts, documentation tables and pictures
	@mkdir -p build
	$(PY) -m zerotrain.operator.api.crd > build/crd.yaml && mv build/crd.yaml crds/zerotrain.dev_zerotrainingjobs.yaml
	mkdir -p deploy/policy && $(PY) -m zerotrain.operator.api.admission_policy > build/policy.yaml && mv build/policy.yaml deploy/policy/jobs.yaml
	$(PY) -m zerotrain.contract.config.document > build/configuration.md && mv build/configuration.md docs/configuration.md
	$(PY) -m zerotrain.contract.config.postponed > build/postponed.md && mv build/postponed.md docs/postponed.md
	$(PY) -m zerotrain.operator.api.reference > build/reference.md && mv build/reference.md docs/reference/zerotrainingjob.md
	$(PY) -m zerotrain.contract.metrics.document > build/metrics.md && mv build/metrics.md docs/metrics.md
	$(PY) -m zerotrain.cli.document > build/cli.md && mv build/cli.md docs/cli.md
	$(PY) -m deploy.dashboards
	$(PY) -m deploy.pictures
	$(PY) -m deploy.chart

clean: ## stop clusters, remove build/ and .venv
	@if [ -x $(DEVCLUSTER) ]; then for d in $(INSTANCES)/*/; do [ -d "$$d" ] && $(DEVCLUSTER) down --name "$$(basename $$d)" --root $(INSTANCES) || true; done; fi
	rm -rf build $(VENV)

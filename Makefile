# Two targets do everything on a fresh machine: `make serve` and `make test`. PYTHON=... picks an interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
PREFILL ?= 1
DECODE ?= 1
SEEDS ?= 5000
# Scripts whose types can be known without a peer's packages.
SCRIPTS := $(filter-out benchmarks/engine_peer.py,$(wildcard benchmarks/*.py benchmarks/interop_vllm/*.py trials/*.py))

.PHONY: serve test check sim bench bench-engine bench-handoff bench-equality bench-cancel bench-router bench-registry \
        bench-transport bench-dialects interop-sglang interop-vllm trials trial-kill trial-drain trial-transfer trial-field docs clean install

serve: $(VENV)/.installed
	$(BIN)/pdplane model install
	$(BIN)/pdplane up --prefill $(PREFILL) --decode $(DECODE) --port $(PORT) $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src:benchmarks:benchmarks/interop_vllm:benchmarks/interop_sglang:trials $(BIN)/mypy $(SCRIPTS)
	$(BIN)/lint-imports

sim: $(VENV)/.installed
	$(BIN)/pdplane sim --seeds $(SEEDS)

bench: bench-engine bench-handoff bench-router bench-registry

bench-engine: $(VENV)/.installed .bench-venv/.installed
	$(BIN)/pdplane model install
	$(BIN)/python benchmarks/engine.py

bench-handoff bench-equality bench-cancel: bench-%: $(VENV)/.installed
	$(BIN)/pdplane model install
	$(BIN)/python benchmarks/$*.py

bench-dialects: $(VENV)/.installed
	$(BIN)/pdplane model install
	$(BIN)/python benchmarks/dialects.py

bench-router: $(VENV)/.installed .bench-venv/.installed
	$(BIN)/python benchmarks/router.py

bench-registry: $(VENV)/.installed .interop-sglang-venv/.installed
	$(BIN)/python benchmarks/registry.py

bench-transport: $(VENV)/.installed .bench-transport-venv/.installed
	$(BIN)/python benchmarks/transport.py

interop-sglang: $(VENV)/.installed .interop-sglang-venv/.installed
	$(BIN)/python benchmarks/interop_sglang/run.py

# Real vLLM on the CPU: 3.5 GB of packages, 12 GB of memory, about 15 minutes; not part of any other target.
interop-vllm: $(VENV)/.installed .interop-vllm-venv/.installed .interop-vllm-router-venv/.installed
	$(BIN)/pdplane model install
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/interop_vllm/run.py $(ARGS)

trials: trial-kill trial-drain trial-transfer trial-field

trial-kill trial-drain trial-transfer trial-field: trial-%: $(VENV)/.installed
	$(BIN)/pdplane model install
	PYTHONPATH=benchmarks $(BIN)/python trials/$*.py

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .bench-venv .bench-transport-venv .interop-sglang-venv .interop-vllm-venv .interop-vllm-router-venv build dist src/*.egg-info

install: $(VENV)/.installed

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version); set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing pdplane into $(VENV) (about a minute)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing pdplane and its test tools into $(VENV) (about a minute)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

.bench-venv/.installed:
	$(PYTHON) -m venv .bench-venv
	.bench-venv/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@

# SGLang's own classes, without the CUDA packages that it would bring: about a gigabyte, and two minutes.
.interop-sglang-venv/.installed:
	$(PYTHON) -m venv .interop-sglang-venv
	.interop-sglang-venv/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements-sglang.txt
	.interop-sglang-venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	@touch $@

# NIXL and Mooncake; the latter needs Debian's libibverbs1 (apt-get install libibverbs1).
.bench-transport-venv/.installed:
	$(PYTHON) -m venv .bench-transport-venv
	.bench-transport-venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  -r benchmarks/requirements-transport.txt
	@touch $@

# Real vLLM on a CPU with NIXL: 3.5 GB, and some minutes.
.interop-vllm-venv/.installed:
	$(PYTHON) -m venv .interop-vllm-venv
	.interop-vllm-venv/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements-vllm.txt
	.interop-vllm-venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	.interop-vllm-venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.interop-vllm-router-venv/.installed:
	$(PYTHON) -m venv .interop-vllm-router-venv
	.interop-vllm-router-venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r benchmarks/requirements-vllm-router.txt
	@touch $@

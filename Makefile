# Two commands on a fresh clone, with Python 3.10-3.12, make and a package index: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# An environment holds one engine: SGLang and vLLM ask for other versions of the same packages.
VLLM_BIN := .venv-vllm/bin
UV_VERSION := 0.13.8
PIP_AUDIT_VERSION := 2.10.1
# Every process of a job imports these; compiled once here instead of once a process.
HEAVY := verl sglang vllm megatron mbridge torch transformers ray tensordict torchvision torchao transfer_queue numpy pandas pyarrow hydra omegaconf \
  huggingface_hub datasets accelerate peft triton fastapi pydantic aiohttp scipy sympy torchdata tokenizers uvicorn openai rich
INSTALLED := .venv/.installed
VLLM_INSTALLED := .venv-vllm/.installed
# uv does not read pip's configuration; hand it the index that pip is set to, if any.
PIP_INDEX := $(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null)

# Set in many images; every process of a job would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-vllm demo-mixed test test-vllm test-gpu gpu-bundles test-hosts explore audit install install-vllm lint lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   two real verl jobs take turns on this machine (about five minutes, no GPU needed)"
	@echo "make demo-vllm, make demo-mixed   the same on vLLM; one job on SGLang and one on vLLM"
	@echo "make test   all tests but those marked gpu"
	@echo "make test-vllm   the tests that need vLLM, and those of what both engines share, in vLLM's environment"
	@echo "make test-gpu   the tests marked gpu: engines and jobs on one CUDA device, tensor parallelism on two"
	@echo "make gpu-bundles   what a GPU machine without a package index needs for these, in files of 60 MB (minutes)"
	@echo "make test-hosts   two real jobs on three hosts, which are namespaces of this machine; needs root (half an hour)"
	@echo "make lint   style, types, arrows between rooms, dead code, sizes and plain words"
	@echo "make explore   for EXPLORE_SECONDS (600) the tests that draw random examples, with new ones"
	@echo "make audit   known vulnerabilities of what requirements/lock*.txt pin, by pip-audit; needs PyPI's own service"

demo: $(INSTALLED)
	$(BIN)/verl-mux run examples/demo.yaml

demo-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/verl-mux run examples/demo_vllm.yaml

demo-mixed: $(INSTALLED) $(VLLM_INSTALLED)
	$(BIN)/verl-mux run examples/demo_mixed.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu and not e2e and not hosts" -n 4 --no-loadscope-reorder --durations 15
	$(BIN)/python -m pytest -m "e2e and not gpu and not hosts" -n 2 --no-loadscope-reorder --durations 15 $$(grep -rl "mark.e2e" tests --include="test_*.py" | grep -v engine/vllm/ | sort)

# Tests that need vLLM, or that say something else where it is the engine.
VLLM_TESTS := tests/rollout/engine tests/upstream tests/launcher/test_doctor.py tests/warm \
  tests/e2e
test-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/python -m pytest -m "not gpu and not hosts" --durations 15 $(VLLM_TESTS)

# One after the other: each has the whole device. What they measure goes to build/gpu/record.jsonl. Where there is no package index,
# the bundles hold pytest too: PYTHONPATH=$PWD:/tmp/site python3 -m pytest -m gpu tests/gpu
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu tests/gpu

gpu-bundles: $(INSTALLED)
	$(if $(PIP_INDEX),UV_DEFAULT_INDEX=$(PIP_INDEX)) $(BIN)/python -m tests.gpu.bundles build/gpu/bundles

test-hosts: $(INSTALLED)
	$(BIN)/python -m pytest tests/hosts

# Only the tests that use hypothesis, with random seeds; a failure prints the command that finds it again.
EXPLORE_SECONDS ?= 600
explore: $(INSTALLED)
	$(BIN)/python -m tests.exploring $(EXPLORE_SECONDS)

install: $(INSTALLED)

install-vllm: $(VLLM_INSTALLED)

$(INSTALLED): requirements/lock.txt
$(VLLM_INSTALLED): requirements/lock-vllm.txt
$(INSTALLED) $(VLLM_INSTALLED): pyproject.toml verl_mux_cpu/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else f"$(PYTHON) is {v[0]}.{v[1]}; verl_mux needs 3.10 to 3.12: make PYTHON=python3.11 ...")'
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(if $(PIP_INDEX),UV_DEFAULT_INDEX=$(PIP_INDEX)) $(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps -r requirements/lock$(subst .venv,,$(@D)).txt
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps --no-build-isolation -e . -e ./verl_mux_cpu
	cd $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') && \
	  $(CURDIR)/$(@D)/bin/python -m compileall -q -j 0 $(HEAVY) >/dev/null 2>&1 || true
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check verl_mux verl_mux_cpu bench research tests examples recipes
	$(BIN)/ruff format --check verl_mux verl_mux_cpu bench research tests examples recipes
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.lint.dead_code
	$(BIN)/python -m tests.lint.budgets
	$(BIN)/mypy

# A package of which the service knows nothing fails it: otherwise it passes where the service cannot be reached.
audit: $(INSTALLED)
	for lock in requirements/lock*.txt; do $(if $(PIP_INDEX),UV_DEFAULT_INDEX=$(PIP_INDEX)) $(BIN)/uv tool run pip-audit==$(PIP_AUDIT_VERSION) \
	  --strict --progress-spinner off --no-deps --disable-pip -r $$lock || exit 1; done

# Resolve requirements/lock.in and lock-vllm.in again. No index address is written.
lock: $(INSTALLED)
	for engine in "" -vllm; do $(BIN)/uv pip compile requirements/lock$$engine.in --override requirements/overrides$$engine.txt \
	  --universal --python-version 3.10 --no-annotate --no-header --no-emit-index-url -o requirements/lock$$engine.txt || exit 1; done

clean:
	rm -rf .venv .venv-vllm runs build *.egg-info

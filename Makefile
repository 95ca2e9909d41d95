# Every target is listed by `make help`. Nothing is installed outside $(VENV).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPT ?= Explain in two sentences why the sky is blue.
NATIVE := CMakeLists.txt pyproject.toml $(shell find kernels/native -type f 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help setup dev models demo test test-gpu lint type proto peer bench check clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/.installed ## a virtual environment with lamina in it

dev: $(VENV)/.dev ## the same with the tools that tests and checks need

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lamina needs Python >= 3.11; this is `$(PYTHON) --version`. Set PYTHON=..." >&2; exit 1; }
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "could not make a virtual environment: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(BIN)/python $(NATIVE)
	@echo "installing lamina into $(VENV)"
	@$(BIN)/python deploy/install.py --editable .
	@touch $@

$(VENV)/.dev: $(BIN)/python $(NATIVE)
	@echo "installing lamina and its development tools into $(VENV)"
	@$(BIN)/python deploy/install.py --editable '.[dev]'
	@touch $(VENV)/.installed $@

models: $(MODEL) ## fetch the default model, checked by SHA-256

$(MODEL): | $(BIN)/python
	@$(BIN)/python deploy/fetch_default_model.py $(MODEL)

demo: export LAMINA_DEMO_PROMPT = $(value PROMPT)
demo: $(VENV)/.installed $(MODEL) ## two workers and a coordinator on loopback answer a prompt
	@$(BIN)/python deploy/demo.py --model $(MODEL) "$$LAMINA_DEMO_PROMPT"

test: $(VENV)/.dev $(MODEL) ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu: $(VENV)/.dev ## tests and benchmarks of a machine with NVIDIA GPUs, into benchmarks/results
	@$(BIN)/python -c 'import cuda.pathfinder, pynvml' || $(BIN)/python deploy/install.py --editable '.[dev,cuda]'
	$(BIN)/python benchmarks/cuda_all.py --json benchmarks/results/cuda-all.json

lint: $(VENV)/.dev ## ruff, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=proto:coordinator:rpc_worker:kernels $(BIN)/lint-imports

type: $(VENV)/.dev ## mypy --strict
	$(BIN)/mypy -p lamina.spec -p lamina.wire -p lamina.coordinator -p lamina.rpc_worker -p lamina.kernels

proto: $(VENV)/.dev ## regenerate the gRPC stubs
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py

check: lint type test ## everything CI runs

# The peer of the benchmarks: llama.cpp with its RPC backend, in an environment of its own, built for the instruction sets
# that this machine's CPU has (/proc/cpuinfo). Not GGML_NATIVE: what it was built with is then in the command line.
PEER_VENV ?= .venv-peer
CPU_FLAGS = $(shell grep -m 1 -E '^flags' /proc/cpuinfo 2>/dev/null)
cpu_has = $(if $(filter $(1),$(CPU_FLAGS)),-DGGML_$(2)=ON,-DGGML_$(2)=OFF)
PEER_ISA_ARGS = $(if $(CPU_FLAGS),$(call cpu_has,avx,AVX) $(call cpu_has,avx2,AVX2) $(call cpu_has,fma,FMA) \
  $(call cpu_has,f16c,F16C) $(call cpu_has,bmi2,BMI2) $(call cpu_has,avx512bw,AVX512) \
  $(call cpu_has,avx512vbmi,AVX512_VBMI) $(call cpu_has,avx512_vnni,AVX512_VNNI) \
  $(call cpu_has,avx512_bf16,AVX512_BF16))
PEER_CMAKE_ARGS ?= -DGGML_RPC=ON -DGGML_NATIVE=OFF $(PEER_ISA_ARGS)

peer: $(PEER_VENV)/.installed ## llama.cpp to compare with (about 5 minutes on two cores)

$(PEER_VENV)/.installed:
	$(PYTHON) -m venv $(PEER_VENV)
	CMAKE_ARGS="$(PEER_CMAKE_ARGS)" $(PEER_VENV)/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	@touch $@

bench: $(VENV)/.dev $(MODEL) $(PEER_VENV)/.installed ## the quick benchmarks, into benchmarks/results
	export LAMINA_PEER_PYTHON="$${LAMINA_PEER_PYTHON:-$(PEER_VENV)/bin/python}"; \
	for script in kernels local rpc serving; do \
	  $(BIN)/python benchmarks/$$script.py --quick --json benchmarks/results/$$script-quick.json || exit 1; done

clean: ## remove what was built (not the model)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Every target is listed by `make help`. Nothing is installed outside $(VENV).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPT ?= Explain in two sentences why the sky is blue.
NATIVE := CMakeLists.txt pyproject.toml $(shell find kernels/native -type f 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help setup dev models demo test lint type proto bench check clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/.installed ## a virtual environment with lamina in it

dev: $(VENV)/.dev ## the same with the tools that tests and checks need

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lamina needs Python >= 3.11; this is `$(PYTHON) --version`. Set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(BIN)/python $(NATIVE)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

models: $(MODEL) ## fetch the default model, checked by SHA-256

$(MODEL):
	$(PYTHON) deploy/fetch_default_model.py $(MODEL)

demo: $(VENV)/.installed $(MODEL) ## two workers and a coordinator on loopback answer a prompt
	@$(BIN)/python deploy/demo.py --model $(MODEL) "$(PROMPT)"

test: $(VENV)/.dev $(MODEL) ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dev ## ruff, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=proto:coordinator:rpc_worker:kernels $(BIN)/lint-imports

type: $(VENV)/.dev ## mypy --strict
	$(BIN)/mypy -p lamina.spec -p lamina.wire -p lamina.coordinator -p lamina.rpc_worker -p lamina.kernels

proto: $(VENV)/.dev ## regenerate the gRPC stubs
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py

check: lint type test ## everything CI runs

clean: ## remove what was built (not the model)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

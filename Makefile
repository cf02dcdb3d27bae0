# Both targets do all the set-up: a virtual environment, the packages, the kernels compiled ahead of time.
#   make demo    runs a small layer, on a Hopper GPU if there is one
#   make test    checks style and types, and runs the tests (those of tests/gpu need a Hopper GPU)
#
# PyTorch is installed first because a plain `pip install torch` on Linux brings gigabytes of CUDA libraries, which
# compiling the kernels does not need. Where there is a GPU, `make TORCH=torch demo` takes that plain build. A Python that
# has PyTorch can be used as it is: `make VENV_FLAGS=--system-site-packages demo`.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
JOBS ?= 2

BIN := $(VENV)/bin

.PHONY: demo test kernels clean

demo: kernels
	$(BIN)/python -m cutlass_moe.demo

test: kernels
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n $(JOBS) tests

kernels: $(VENV)/.installed
	$(BIN)/python -m cutlass_moe build

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) cutlass_moe/lib .carry

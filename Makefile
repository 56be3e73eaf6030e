# `make quickstart` and `make test` start from nothing but Python 3.11.
PYTHON ?= python3.11
VENV := .venv

# The versions that are tested together: `make quickstart` installs core.txt, `make test` adds dev.txt to it, which holds the
# same versions and more. The locks hold the same versions with hashes. `make constraints` writes all four.
CORE_CONSTRAINTS := requirements/core.txt
DEV_CONSTRAINTS := requirements/dev.txt
CORE_LOCK := requirements/core.lock
DEV_LOCK := requirements/dev.lock
CORE_INSTALLED := $(VENV)/installed-core
DEV_INSTALLED := $(VENV)/installed-dev

# uv installs faster than pip and is used where it is on the PATH; `make UV= quickstart` installs with pip all the same.
UV := $(shell command -v uv 2>/dev/null)
# Where torch comes from if not from pip's own index: `make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu`.
TORCH_INDEX ?=

UNPACKING := After \"Installing collected packages\" all of it is unpacked, which takes up to some minutes and may be silent.
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check
TORCH := $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)

# Installs $(1) under the constraints of the file $(2), which may be empty. Nothing is quiet: a newer pip also shows what it
# is unpacking, which an older one does for a minute without a word. torch comes first and from pip where anything but pip
# alone has a say in it: uv reads no pip configuration, so it would take another build of torch than pip does, and PyTorch's
# own index has only some versions of what torch needs. What is installed then satisfies the last command. uv has to be told
# to compile modules, or eight ranks do it at once before the first step.
define install
test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
$(if $(UV),,$(PIP) 'pip>=25.1')
$(if $(UV)$(TORCH_INDEX),$(PIP) --no-deps $(addprefix -c ,$(2)) '$(TORCH)' $(addprefix --index-url ,$(TORCH_INDEX)))
$(if $(UV),$(UV) pip install --compile-bytecode --python $(VENV)/bin/python,$(PIP)) $(addprefix -c ,$(2)) -e '$(1)'
endef

# One environment is made by one installation at a time.
.NOTPARALLEL:
.PHONY: audit install-locked install-dev-locked quickstart test test-unit test-all test-cluster test-device test-packages cluster-packages check install install-dev constraints locks newest gpu gpu-wheels

install: $(CORE_INSTALLED)

install-dev: $(DEV_INSTALLED)

$(CORE_INSTALLED): pyproject.toml $(CORE_CONSTRAINTS)
	@echo "Installing megalite into $(VENV): about 0.4 GB to download and 1.6 GB on disk with a CPU build of torch, about 3 GB and 6 GB with a CUDA build."
	@echo "$(UNPACKING)"
	$(call install,.,$(CORE_CONSTRAINTS))
	touch $@

# All that the core needs is in here, so its stamp is set as well.
$(DEV_INSTALLED): pyproject.toml $(CORE_CONSTRAINTS) $(DEV_CONSTRAINTS)
	@echo "Installing megalite and what its tests need into $(VENV): about 0.5 GB to download and 2.3 GB on disk with a CPU build of torch, about 3 GB and 7 GB with a CUDA build."
	@echo "$(UNPACKING)"
	$(call install,.[dev],$(DEV_CONSTRAINTS))
	touch $(CORE_INSTALLED) $@

# The same versions as `install` and `install-dev`, each file held to the hashes in requirements/*.lock; pip refuses any other.
# Packages without wheels are built with the setuptools of the lock. torch is left out: its builds for a CPU and for each
# CUDA have hashes of their own, so what comes from TORCH_INDEX is as safe as the connection to it, and so are the CUDA
# libraries that this build names.
define install-locked
test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
sed -n '/^setuptools==/,/[^\\]$$/p' $(2) >$(VENV)/setuptools.lock
$(PIP) --require-hashes --no-deps -r $(VENV)/setuptools.lock
$(PIP) --require-hashes --no-deps --no-build-isolation -r $(2)
$(PIP) -c $(3) '$(TORCH)' $(addprefix --index-url ,$(TORCH_INDEX))
$(PIP) --no-deps --no-build-isolation -e '$(1)'
$(VENV)/bin/python -m pip check
endef

install-locked:
	$(call install-locked,.,$(CORE_LOCK),$(CORE_CONSTRAINTS))
	touch $(CORE_INSTALLED)

install-dev-locked:
	$(call install-locked,.[dev],$(DEV_LOCK),$(DEV_CONSTRAINTS))
	touch $(CORE_INSTALLED) $(DEV_INSTALLED)

# Looks the tested versions up among known vulnerabilities, which needs PyPI itself. pip-audit has an environment of its own.
AUDIT := .venv-audit
audit:
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --disable-pip-version-check 'pip-audit>=2.9,<3'; }
	@$(AUDIT)/bin/python requirements/audit.py $(DEV_CONSTRAINTS)

# text -> tokens -> eight ranks (tensor 2 x pipeline 2 x data 2) -> checkpoint -> Hugging Face folder -> a sample
QUICK := runs/quickstart
quickstart: $(CORE_INSTALLED)
	$(VENV)/bin/megalite prepare python-stdlib --train-vocab-size 2048 -t $(QUICK)/tokenizer -o $(QUICK)/data/python_stdlib
	DS_ACCELERATOR=cpu $(VENV)/bin/megalite train configs/quickstart.yaml
	$(VENV)/bin/megalite export $(QUICK) $(QUICK)/hf --overwrite
	$(VENV)/bin/megalite generate $(QUICK)/hf --prompt "def __init__(self" --temperature 0.8 --seed 1
	@echo "What now: open $(QUICK)/report.html; train on with '$(VENV)/bin/megalite train configs/quickstart.yaml training.steps=300' and see it meanwhile with '$(VENV)/bin/megalite watch $(QUICK)'; your own text, GPUs and models: README.md."

check: $(DEV_INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

# Where Python keeps no bytecode, each of the workers and of the hundreds of commands that tests start compiles all our
# modules again.
unexport PYTHONDONTWRITEBYTECODE
# Tests of one file stay on one of the workers, so that they share their fixtures. On two cores ranks of a fourth worker
# would mostly wait for each other: eight files took 145 s on four and 118 s on two.
WORKERS ?= 3
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: check
	$(PYTEST) tests/unit tests/performance tests/ranks tests/e2e

test-unit: $(DEV_INSTALLED)
	$(PYTEST) tests/unit

# Every matrix in full, all documented commands and the cluster tier: hours on two cores, before a release.
test-all: check test-packages
	$(PYTEST) --exhaustive tests/unit tests/performance tests/ranks tests/e2e
	$(VENV)/bin/python -m pytest --exhaustive tests/cluster

# Several hosts on this machine, made of namespaces: Linux, root, and programs that Debian has.
test-cluster: test-packages
	$(VENV)/bin/python -m pytest tests/cluster

# Training on a CUDA device that is not there, in an environment with torch's CUDA build (tests/device says what that is):
# the tested version of torch, or `make test-device DEVICE_TORCH=2.11.0 PYTHON=python3.12`. PyPI has CUDA builds; a folder of
# pip's may have the same version for CPUs. Another version of torch may ask for another one of setuptools.
TORCH_VERSION := $(shell sed -n 's/^torch==//p' $(DEV_CONSTRAINTS))
DEVICE_TORCH ?= $(TORCH_VERSION)
DEVICE := .venv-device$(patsubst %,-%,$(filter-out $(TORCH_VERSION),$(DEVICE_TORCH)))
DEVICE_OPTIONS ?=
test-device: $(DEVICE)/installed
	$(DEVICE)/bin/python -m tests.device $(DEVICE_OPTIONS)

$(DEVICE)/installed: pyproject.toml $(CORE_CONSTRAINTS) $(DEV_CONSTRAINTS)
	@echo "Installing megalite with torch's CUDA build into $(DEVICE): about 3 GB to download and 6 GB on disk."
	test -x $(DEVICE)/bin/python || $(PYTHON) -m venv $(DEVICE)
	sed -e 's/^torch==.*/torch==$(DEVICE_TORCH)/' -e '/^setuptools==/d' $(DEV_CONSTRAINTS) >$(DEVICE)/constraints.txt
	$(DEVICE)/bin/python -m pip install -c $(DEVICE)/constraints.txt '$(TORCH),!=$(DEVICE_TORCH)+cpu'
	$(DEVICE)/bin/python -m pip install -c $(DEVICE)/constraints.txt -e '.[float8]' pytest pytest-timeout pytest-xdist hypothesis
	$(DEVICE)/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__ + " is no CUDA build"'
	touch $@

# Debian's programs that tests use: of clusters and networks, a browser, Prometheus. Without root or Debian it says what is
# missing, and tests that need it are skipped. `cluster-packages` is its older name.
test-packages cluster-packages: $(DEV_INSTALLED)
	$(VENV)/bin/python -m tests.helpers.cluster_machine
	$(VENV)/bin/python -m tests.helpers.browser
	$(VENV)/bin/python -m tests.helpers.prometheus_server

# Writes the constraints files, with the versions that they already hold where these still fit;
# `make constraints UPGRADE=--upgrade` takes the newest of everything. All extras are resolved together, then the core under
# what came out, so that the core's file is a part of the other. The build of torch and what only CUDA builds need are left
# to pip: each build names the versions that it needs itself. nvidia-ml-py is no part of CUDA.
UPGRADE ?=
COMPILE = $(UV) pip compile --quiet pyproject.toml --python-version 3.11 --python-platform linux --no-header --no-annotate
PLAIN := sed -e '/^nvidia-ml-py=/b' -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton=/d' -e 's/^\(torch==[^+ ]*\)+.*/\1/'
constraints:
	@test -n "$(UV)" || { echo "make constraints needs uv on the PATH: pip install uv, or https://docs.astral.sh/uv/" >&2; exit 2; }
	$(COMPILE) $(UPGRADE) --all-extras --output-file $(DEV_CONSTRAINTS) >/dev/null
	$(COMPILE) --upgrade -c $(DEV_CONSTRAINTS) --output-file $(CORE_CONSTRAINTS) >/dev/null
	for file in $(CORE_CONSTRAINTS) $(DEV_CONSTRAINTS); do $(PLAIN) $$file >$$file.tmp && mv $$file.tmp $$file || exit; done
	$(MAKE) locks

# Only the hashes of the versions that the constraints hold.
LOCK = $(UV) pip compile --quiet --no-deps --generate-hashes --no-emit-package torch --python-version 3.11 --python-platform linux --no-header --no-annotate
locks:
	$(LOCK) $(CORE_CONSTRAINTS) --output-file $(CORE_LOCK) >/dev/null
	$(LOCK) $(DEV_CONSTRAINTS) --output-file $(DEV_LOCK) >/dev/null

# What a newcomer without our constraints would get: the newest versions that pyproject.toml allows, in an environment of
# their own, and whether the checks and the quick tests pass with them.
NEWEST := .venv-newest
newest:
	rm -rf $(NEWEST)
	$(MAKE) VENV=$(NEWEST) CORE_CONSTRAINTS= DEV_CONSTRAINTS= install-dev
	@echo "Newer or other versions than $(DEV_CONSTRAINTS) holds:"
	@$(NEWEST)/bin/python -m pip freeze --exclude-editable | sed 's/_/-/g; s/+.*//' | grep -vixFf $(DEV_CONSTRAINTS) || echo none
	$(MAKE) VENV=$(NEWEST) CORE_CONSTRAINTS= DEV_CONSTRAINTS= check
	$(NEWEST)/bin/python -m pytest -m "not slow"

# What a machine with a GPU can tell, in parts of at most eight minutes; the same command goes on where it stopped. It
# takes the Python that is there, because a GPU machine may have no other with torch: docs/gpu_day.md.
GPU_PYTHON ?= $(firstword $(wildcard $(VENV)/bin/python) python3)
GPU_OPTIONS ?=
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu_day $(GPU_OPTIONS)

# Packages for a GPU machine without internet that has torch, into .wheels/; PYTHON_VERSION=3.12 for another Python
gpu-wheels: $(DEV_INSTALLED)
	$(VENV)/bin/python -m benchmarks.gpu_day.wheels $(if $(PYTHON_VERSION),--python $(PYTHON_VERSION))

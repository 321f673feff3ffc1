# One tool for everything: `make` lists the targets. `make demo` and `make test` set up all they need.
.DEFAULT_GOAL := help
PYTHON ?= python3
# Another interpreter has an environment of its own: `make test PYTHON=python3.13` leaves .venv as it is.
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PACKAGES := core plugins/quark_schemes plugins/quark_algos plugins/quark_templates plugins/quark_exporters plugins/quark_graph plugins/quark_amd plugins/quark_vllm plugins/quark_vq workbench tiny_model devkit
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
# Processes that share the tests (pytest-xdist): a number, or auto for one per core. Each uses one thread: the tests are small, and
# threads that wait for each other cost more than they bring.
WORKERS ?= auto
DOCUMENTS = tests/repository/test_doctests.py tests/repository/test_layout.py tests/repository/test_docs.py tests/repository/test_docs_generated.py \
	tests/repository/test_docs_site.py tests/integration/test_readme.py tests/integration/test_distribution_readmes.py \
	examples/acme_quant/tests/test_readme.py plugins/quark_algos/tests/test_readme.py plugins/quark_templates/tests/test_readme.py
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(if $(OTHER_CPU),--other-cpu) $(if $(SYSTEM),--system $(SYSTEM))
# The part of the suite that compares what products and sums lead to, in a minute: golden files, bytes of runs, an accelerator beside the CPU.
NUMERIC = tests/kit/other_cpu tests/test_golden_layers.py tests/test_golden_values.py tests/test_same_bytes.py tests/test_on_an_accelerator.py \
	core/tests/algorithms core/tests/models/layers plugins/quark_exporters/tests/test_golden_export.py \
	plugins/quark_exporters/tests/compressed_tensors plugins/quark_algos/tests/gptq

.PHONY: help install demo test quick numeric coverage docs slow mutants lint types imports check fuzz wheels tasks kernels lowest newest matrix bench bars accelerator neighbours clients browser clean

help:  ## list the most used targets (ALL=1: all targets)
	@grep -E '^[a-z ]+:.*#[$(if $(ALL),#>,#)] ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+)( [a-z]+)?:[^#]*#[#>] /  \1\2\t/' | expand -t 18

install: $(STAMP)  ## create .venv with the pinned torch and all distributions, editable

$(STAMP): constraints.txt requirements-dev.txt $(PACKAGES:%=%/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quark needs Python 3.11 or newer: run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation $(PACKAGES:%=-e %)
	@touch $@

demo: install  ## quantize, export, reload and compare the tiny model
	$(BIN)/quark demo

test: install  ## run a selection of the tests, offline, in some minutes (ALL=1: every test; WORKERS=: processes; PYTEST_ARGS=: such as paths; OTHER_CPU=1: sums in another order; SYSTEM=windows or macos: simulate it)
	$(PYTEST) $(if $(ALL)$(EVERY),,--few) $(PYTEST_ARGS)

quick: lint types  ## check style and types, and run the tests nearest to the changes since main (SINCE=: another commit)
	tests=$$($(BIN)/python -m tools.changed_tests --since $(or $(SINCE),main)); test -z "$$tests" || $(PYTEST) --few $$tests $(PYTEST_ARGS) || test $$? -eq 5  # 5: all of them are left out here

numeric: install  #> run the numerical tests with sums in another order, as on another CPU (ALL=1: every one)
	$(PYTEST) --other-cpu $(if $(ALL),,--few) $(NUMERIC) $(PYTEST_ARGS)

coverage: install  #> measure which lines of the core tests run: coverage.xml, and an error below the floor
	$(PYTEST) core/tests workbench/tests tests/integration --cov --cov-report=term:skip-covered --cov-report=xml $(PYTEST_ARGS)

docs: install  ## build the site of docs/ in site/ (warnings are errors), and test its pages, docstrings, READMEs and CONTRIBUTING.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(PYTEST) $(DOCUMENTS) -m "documents$(if $(EVERY),, or not slow)" $(PYTEST_ARGS)

slow: install  #> run the slow tests: every algorithm and every family with every scheme
	$(PYTEST) -m slow --timeout 3600 $(PYTEST_ARGS)

# Drawn changes are of operators or of behaviour (KIND=: one of these). Each kind takes about an hour of one core. A run first measures which tests run which line, and keeps that in .mutants/.
COUNT ?= 400
KIND ?= operators behaviours
SEED ?= 0
mutants: install  ## break the code on purpose; tests must notice each listed change (NAMES=: only these) and 85 % of COUNT=400 random ones in every package (SEED=; KIND=; DRAWN=: only in these packages)
	$(if $(DRAWN),,OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants $(NAMES))
	$(if $(NAMES),,set -e; for kind in $(KIND); do OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants.drawn --kind $$kind --count $(COUNT) --seed $(SEED) --packages $(DRAWN); done)

fuzz: install  #> damage checkpoints in 500 ways, run every route on each, and count the outcomes (FUZZ_ARGS=: other cases)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz $(FUZZ_ARGS)

lint: install  ## check style and errors with ruff; warn of spelling and long sentences
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	-$(BIN)/codespell README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md docs core/src workbench/src devkit/src plugins
	-$(BIN)/python -m tools.docs.prose README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md $$(find docs -name '*.md')

types: install  #> check types with mypy, strict on core
	$(BIN)/mypy

imports: install  #> check layers of imports with import-linter
	$(BIN)/lint-imports

# Each question is asked once: EVERY=1 means that `test` runs every test, so `docs` runs only those that `test` leaves out. Sums in another
# order have a selection here; the job other-cpu of continuous integration runs them all.
check: lint types imports test numeric docs  ## run all checks of continuous integration
check: EVERY := 1

# The demo runs in a fresh environment with only the wheels and their dependencies, installed by name as users do.
wheels: install  ## build all wheels into dist/, and run the demo in a fresh environment with them
	rm -rf dist $(VENV)-wheels && mkdir dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist $(PACKAGES:%=./%)
	$(PYTHON) -m venv $(VENV)-wheels
	$(VENV)-wheels/bin/python -m pip install --quiet -c constraints.txt --find-links dist 'quark-core[demo]' quark-devkit quark-vllm
	cd dist && QUARK_STRICT_PLUGINS=1 ../$(VENV)-wheels/bin/quark demo

tasks:  #> run the tests of the extras: tasks of lm-evaluation-harness, Parquet files, data sets of the Hub (offline)
	$(PYTHON) -m venv $(VENV)-tasks
	$(VENV)-tasks/bin/python -m pip install --quiet -r requirements-dev.txt
	$(VENV)-tasks/bin/python -m pip install --quiet $(PACKAGES:%=-e %) datasets pyarrow lm-eval
	OMP_NUM_THREADS=1 $(VENV)-tasks/bin/python -m pytest workbench/tests/evaluate workbench/tests/data $(PYTEST_ARGS)

# TRITON=: another release, such as triton==3.4.0, the first that compiles the kernels.
TRITON ?= "triton>=3.4"
KERNELS_PYTHON = $(if $(HERE),$(PYTHON),$(VENV)-kernels/bin/python)
# With a GPU, kernels are compiled and measured beside a copy. Otherwise Triton's interpreter runs them on the CPU.
KERNELS = core/tests/numbers/kernels plugins/quark_schemes/tests/kernels plugins/quark_algos/tests/gptq/test_column_kernel.py tests/integration/test_compiled_kernels.py tests/test_costs.py::test_runs_by_kernels_cost_what_was_recorded
kernels:  #> compare Triton kernels with torch, bit for bit, and compile them for GPUs; with a GPU, measure bandwidth (HERE=1: use the torch and Triton of PYTHON)
ifdef HERE
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation $(PACKAGES:%=-e %)
else
	$(PYTHON) -m venv $(VENV)-kernels
	$(VENV)-kernels/bin/python -m pip install --quiet -r requirements-dev.txt
	$(VENV)-kernels/bin/python -m pip install --quiet $(PACKAGES:%=-e %) $(TRITON)
endif
	gpu=$$($(KERNELS_PYTHON) -c "import torch; print(int(torch.cuda.is_available()))") && \
	OMP_NUM_THREADS=1 TRITON_INTERPRET=$$((1 - gpu)) $(KERNELS_PYTHON) -m pytest $(KERNELS) $(PYTEST_ARGS) && \
	$(KERNELS_PYTHON) -m benchmarks --only kernels

# Cells are in tools/matrix/cells.py. CELLS=: some of them, by name or by a version, such as CELLS=3.13.
matrix: install  #> run tests beside other versions of Python, torch and transformers, and update the table of the documentation
	$(BIN)/python -m tools.matrix $(MATRIX_ARGS) $(CELLS)

# The ends of the ranges in the pyproject.toml files, each in its own environment.
lowest: TEST_CONSTRAINTS := -c constraints-lowest.txt
newest: TEST_CONSTRAINTS := --upgrade
lowest newest:  #> run the tests with the lowest or the newest allowed versions of all dependencies
	$(PYTHON) -m venv $(VENV)-$@
	$(VENV)-$@/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-$@/bin/python -m pip install --quiet $(TEST_CONSTRAINTS) -r requirements-dev.txt
	$(VENV)-$@/bin/python -m pip install --quiet $(TEST_CONSTRAINTS) $(PACKAGES:%=-e %)
	OMP_NUM_THREADS=1 $(VENV)-$@/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

bench: install  #> run the benchmarks, and add the results to the page of the documentation (BENCH_ARGS=: such as --model DIR)
	$(BIN)/python -m benchmarks --results docs/data/benchmarks.json $(BENCH_ARGS)

bars: install  #> check runs from disk to disk: memory by layers, throughput beside a copy, an 8B model under 4 GiB (21 GB of disk, minutes)
	$(BIN)/python -m benchmarks.disk_to_disk layers
	$(BIN)/python -m benchmarks.disk_to_disk copy
	$(BIN)/python -m benchmarks.disk_to_disk large

accelerator: $(if $(HERE),,install)  #> measure time and memory of large random models on a GPU, from disk (10 minutes, 40 GB of disk; ACCELERATOR_ARGS=: such as tiny --device cpu; HERE=1: use the torch of PYTHON)
	$(if $(HERE),$(PYTHON),$(BIN)/python) -m benchmarks.accelerator $(ACCELERATOR_ARGS)

# TORCH_INDEX= has torch for machines without a GPU. If it is empty, torch and torchvision come from pip's own indexes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
neighbours: wheels  #> install the wheels beside vLLM, llm-compressor and SGLang in fresh environments, and use both (NAMES=: some of them; 16 GB of disk for all)
	$(BIN)/python -m tools.neighbours $(NAMES) --torch-index "$(TORCH_INDEX)" --folder $(VENV)-neighbours --results docs/data/neighbours.json

# Each client has its own environment. vLLM uses the environment of `make neighbours`; its tests need lm-eval there.
VLLM_PYTHON ?= $(abspath $(wildcard $(VENV)-neighbours/vllm/bin/python))
clients: install  #> load exports in transformers, onnxruntime, vLLM, llama.cpp, AMD Quark, and add the results to the page of the documentation (VLLM_PYTHON=, LLAMA_PYTHON=, AMDQ_PYTHON=, ORT_PYTHON=)
	$(if $(and $(VLLM_PYTHON),$(filter file,$(origin VLLM_PYTHON))),$(VLLM_PYTHON) -m pip install --quiet "lm-eval[api]")
	VLLM_PYTHON=$(VLLM_PYTHON) CLIENTS_RESULTS=docs/data/clients.json $(BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

# playwright uses the system's browser: apt-get install chromium. axe-core comes from npm; without npm it is left out.
browser: install  #> test a report's page in headless Chromium (CHROMIUM=: its program)
	$(PYTHON) -m venv $(VENV)-browser
	$(VENV)-browser/bin/python -m pip install --quiet playwright
	-cd $(VENV)-browser && npm pack --silent axe-core && tar xzf axe-core-*.tgz package/axe.min.js
	QUARK_BROWSER_PYTHON=$(VENV)-browser/bin/python AXE=$$(ls $(VENV)-browser/package/axe.min.js 2>/dev/null) $(BIN)/python -m pytest -m browser tests/browser $(PYTEST_ARGS)

clean:  #> remove everything that make has made
	rm -rf .venv .venv-* dist site demo-out .mutants .coverage coverage.xml

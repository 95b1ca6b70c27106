# Two commands do all the set-up: `make demo` and `make test`. Needs Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 2

# Two pytest processes, as most tests keep one core busy: these, whose words come when they are done, beside all others.
FIRST := tests/faults tests/test_kernels.py tests/test_stages.py tests/test_micro_batches.py
GPU := kernel_cases block_cases unit_cases update_cases test_engine test_replayed test_micro_batches test_draws

.PHONY: demo test lint types unit unit-first unit-others test-browser docs faults bench-cpu gpu gpu-files gpu-parts gpu-timed kernels clean

demo: $(VENV)/.installed
	$(BIN)/bicovg train digits
	@echo
	@echo "Next: bicovg recipes                                  all recipes of the paper's tables"
	@echo "      bicovg train digits --seeds 0 1 2 3 4           spread over seeds"
	@echo "      bicovg train digits-per-channel                 the goodness the paper improves on"
	@echo "      bicovg compare RUN RUN                          gains per block"
	@echo "(activate the environment first: . $(VENV)/bin/activate)"

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 unit-others unit-first

unit-first unit-others: export OMP_NUM_THREADS = 1

unit-others: $(VENV)/.dev
	$(BIN)/python -m pytest -q --durations=10 $(addprefix --ignore=,$(FIRST))

unit-first: $(VENV)/.dev
	@mkdir -p build
	@$(BIN)/python -m pytest -q --durations=10 $(FIRST) >build/unit-first.log 2>&1; code=$$?; cat build/unit-first.log; exit $$code

# The report page in a headless Chromium (Debian: chromium, chromium-driver); part of `unit` where there is one.
test-browser: $(VENV)/.dev
	$(BIN)/python -m pytest -q -rs tests/browser

# The site, in site/; a broken link is an error.
docs: $(VENV)/.dev
	$(BIN)/python docs/make_api.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every fault as often as the full counts say, with a dated table in records/faults; `make test` tries a share of them.
faults: $(VENV)/.dev
	$(BIN)/python tests/faults/run.py

bench-cpu: $(VENV)/.dev
	$(BIN)/python benchmarks/step_cpu.py

# On a CUDA machine: the tests that need one; `make -j5 gpu` runs as many files at once, and what is timed alone after them.
# `make test` runs their other cases in Triton's interpreter or on the CPU. Of some files those tests alone: others there
# fork, which a process that has used a GPU cannot.
GPU_FILES := $(addprefix gpu-,$(GPU))
GPU_PARTS := test_loader.py::test_streamed_and_resident_batches_agree_on_the_gpu \
	test_loader.py::test_a_captured_graph_gives_the_batches_of_the_loader \
	test_bench.py::test_peak_memory_of_a_replayed_graph_covers_what_it_works_in
GPU_TIMED := test_stages.py::test_a_gpus_own_times_are_shorter_than_those_with_launches faults/test_gpu.py
gpu:
	@$(MAKE) --no-print-directory -k gpu-files; code=$$?; $(MAKE) --no-print-directory gpu-timed && exit $$code

gpu-files: $(GPU_FILES) gpu-parts

$(GPU_FILES): gpu-%:
	@mkdir -p build/$(dir $*)
	@$(PYTHON) -m pytest -q -rs --durations=5 tests/$*.py >build/$*.log 2>&1; code=$$?; cat build/$*.log; exit $$code

gpu-parts:
	@$(PYTHON) -m pytest -q -rs $(addprefix tests/,$(GPU_PARTS))

gpu-timed:
	$(PYTHON) -m pytest -q -rs $(addprefix tests/,$(GPU_TIMED))

# On a CUDA machine: every kernel at every recipe's shapes, bf16 and float32.
kernels:
	$(PYTHON) benchmarks/kernels.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bicovg needs Python >= 3.11: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python constraints.txt pyproject.toml
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[data]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build site *.egg-info

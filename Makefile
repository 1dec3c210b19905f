# make demo         train a DLRM with the 26 MLPerf tables, one of them hot, on 2 ranks under three planners that may
#                   split tables by columns; ends with a table, and the plan's report in demo.html
# make test         all tests, PROCESSES=2 at a time
# make coverage     lines and branches of the package that the tests run, half as long again
# make fuzz         CASES=1000 randomly damaged files, others each time
# make test-matrix  a short training, TorchRec's seams and plan files with other releases of TorchRec, then these and
#                   doctor with the newest torch and FBGEMM, in .matrix/newest from requirements/newest.txt
# make gpu          all that the GPUs at hand can tell, in MINUTES=25, and a checkpoint for them; DEVICE=cpu MINUTES=3 tries
#                   it on two CPU ranks
# make docs         the pages of docs/ as a site, in site/; in .venv-docs, from requirements/docs.txt
# make check        lint, format, types, pages and their links; its tools are in .venv-check, from requirements/check.txt
# Each other makes .venv first, from an exact lock: requirements/cuda.txt where nvidia-smi lists a GPU, else requirements/cpu.txt.

PYTHON ?= $(firstword $(shell command -v python3.11 python3))
LOCK := requirements/$(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),cuda,cpu).txt
# Asked only if pip's configured indexes lack a locked file, as most lack torch's CPU build.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ELSE_TORCH_INDEX = $(if $(findstring cpu,$(LOCK)),|| $(PIP) --no-build-isolation --extra-index-url $(TORCH_CPU_INDEX) -r $(LOCK))
PROCESSES ?= 2
MATRIX := 1.6.1 1.7.0 1.9.2
SEAMS := tests/distributed/test_loaded_plan.py tests/hot_rows/test_training.py \
    tests/torchrec_components/test_plugin.py tests/problem/test_table_reader.py tests/planning/test_refusals.py \
    tests/plans/test_report.py tests/problem/test_fused_groups.py tests/search_space/test_estimates.py \
    tests/plans/test_plan_file.py
# These depend on torch and FBGEMM, which only the newest set changes.
NEWEST_TESTS := tests/measure/test_kernels.py \
    tests/test_install.py::test_import_starts_nothing_and_preloading_gives_a_new_python_the_fast_kernels \
    tests/cli/test_commands.py::test_doctor_names_the_checkpoint_and_what_cuda_lacks

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
NEWEST_PIP := .matrix/newest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
STAMP := .venv/installed-$(notdir $(LOCK:.txt=))

# The page theme else prints an advertisement for its successor.
export NO_MKDOCS_2_WARNING := 1
# Ranks and tests are processes side by side: one thread each.
export OMP_NUM_THREADS ?= 1

DEVICE ?= cuda
MINUTES ?= 25
CASES ?= 1000
TESTS ?= tests

.PHONY: venv demo check style types pages test coverage fuzz test-matrix gpu docs clean
.DELETE_ON_ERROR:

venv: $(STAMP)

$(STAMP): $(LOCK) setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	@echo "installing $(LOCK) into .venv, about a minute ..."
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@# The build tools first: a source archive in the lock builds with them, not with newer ones downloaded unasked.
	@$(PIP) $$(grep -E '^(setuptools|wheel)==' $(LOCK))
	@$(PIP) --no-build-isolation -r $(LOCK) $(ELSE_TORCH_INDEX)
	@$(PIP) --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	$(BIN)/torchrun --standalone --nproc_per_node=2 benchmarks/run_dlrm.py --hot 6 --optimizer adagrad \
	    --sharding-types table_wise,column_wise --min-partition 32 --planners dreamshard,torchrec,torchrec_default --copies 2 \
	    --report demo.html

test: $(STAMP)
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal

# Started in every Python that tests start, by a folder on the path.
.matrix/coverage/installed: requirements/coverage.txt $(STAMP)
	@rm -rf $(@D)
	@$(PIP) --target $(@D) -r $<
	@echo 'import coverage; coverage.process_startup()' > $(@D)/sitecustomize.py
	@touch $@

coverage: export PYTHONPATH := $(CURDIR)/.matrix/coverage
coverage: export COVERAGE_FILE := $(CURDIR)/.matrix/coverage/data
coverage: .matrix/coverage/installed
	@rm -f $(COVERAGE_FILE)*
	COVERAGE_PROCESS_START=$(CURDIR)/setup.cfg $(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal $(TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

fuzz: $(STAMP)
	$(BIN)/python -m pytest tests/test_fuzz.py --cases $(CASES)

gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py --device $(DEVICE) --minutes $(MINUTES) $(if $(OUT),--out $(OUT))

# A release of TorchRec lies in a folder of its own, first on the path, over the locked torch and FBGEMM.
.matrix/%/installed: $(STAMP)
	@rm -rf $(@D)
	@$(PIP) --target $(@D) torchrec==$*
	@touch $@

# What requirements/newest.txt does not pin is installed as in cpu.txt.
.matrix/newest/installed: requirements/newest.txt requirements/cpu.txt
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@grep -vE '^(torch|fbgemm-gpu-cpu|torchrec)==' requirements/cpu.txt > $(@D)/rest.txt
	@$(NEWEST_PIP) $$(grep -E '^(setuptools|wheel)==' $(@D)/rest.txt)
	@$(NEWEST_PIP) --no-build-isolation -r $(@D)/rest.txt -r $<
	@touch $@

test-matrix: $(MATRIX:%=.matrix/%/installed) .matrix/newest/installed
	@set -e; for release in $(MATRIX); do \
	    echo "== torchrec $$release"; \
	    PYTHONPATH=.matrix/$$release $(BIN)/python -m pytest -q $(SEAMS); \
	done
	@echo "== $$(grep -E '^(torch|fbgemm|torchrec)' requirements/newest.txt | tr '\n' ' ')"
	PYTHONPATH=$(CURDIR) .matrix/newest/bin/python -m dreamshard_planner doctor
	PYTHONPATH=$(CURDIR) .matrix/newest/bin/python -m pytest -q $(SEAMS) $(NEWEST_TESTS)

.venv-%/installed: requirements/%.txt
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

docs: .venv-docs/installed
	$(<D)/bin/mkdocs build

check: style types pages

style: .venv-check/installed
	$(<D)/bin/ruff check --quiet
	$(<D)/bin/ruff format --check --quiet

types: .venv-check/installed $(STAMP)
	$(<D)/bin/mypy

pages: .venv-docs/installed $(STAMP)
	$(<D)/bin/mkdocs build --strict
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_prose.py -k "links or reference or prose or start_with"

clean:
	rm -rf .venv .venv-docs .venv-check .matrix .mypy_cache .ruff_cache .pytest_cache *.egg-info demo.html site

# SPDX-License-Identifier: Apache-2.0
# Everything runs in a virtual environment of the checkout, .venv, which the first target that needs it makes. With another
# torch or Python than these it runs in a copy of the checkout, which has an environment and a build of its own.

NEWEST := torch==2.15.0
PYTHON ?= python3
TORCH ?= $(NEWEST)
JOBS ?= $(shell nproc)
# Files of tests at a time; most tests wait for processes of their own, up to eight.
TEST_JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported, and kept: most of torch's never are, and all would take half a minute.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-compile
DEPENDENCIES := $(VENV)/.dependencies-$(TORCH)
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu')
CXX_FILES := $(shell find csrc tests/cpp tests/cuda tests/fuzz -name '*.cpp' -o -name '*.h' -o -name '*.cu')
PY_DIRS := bytecheckpoint tests demo benchmarks docs setup.py

.PHONY: help demo test check ground environment compat torture fuzz bench bench-all gpu-wheels gpu-rehearsal docs wheel wheels sdist lint tidy format sanitize sanitize-python run_asan run_tsan build clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

include tests/compat.mk

ifndef IN_A_COPY
demo: $(VENV)/.built  ## train, save, reshard, resume, and compare with stock DCP
	$(BIN)/python demo/train_and_resume.py

test: $(VENV)/.built $(VENV)/.test build/objects/.testing build/failpoints/.built  ## all tests
	bash tests/system_packages.sh
	MAX_JOBS=$(JOBS) $(PYTEST) $(PYTEST_ARGS)

# As long as a few minutes, for the time between two edits. BASE is what the change is measured against.
BASE ?= main
check: $(VENV)/.built $(VENV)/.test  ## what most likely shows that a change since BASE=main is wrong, in about 3 minutes
	$(BIN)/python tests/check.py $(BASE)

# Not at once: each file system shall have the machine to itself. `python tests/ground/table.py build/ground.json` takes
# what was found over into docs/guarantees.md.
ground: $(VENV)/.built $(VENV)/.test build/objects/.testing build/failpoints/.built  ## shared file systems, stores, four machines and Megatron-Core, over an hour; to build/ground.json
	BCP_GROUND=1 $(BIN)/python -m pytest tests/ground tests/ground_stores tests/machines \
	  tests/interop/test_megatron_strategies.py $(PYTEST_ARGS)

environment: $(VENV)/.test  ## the virtual environment of the tests, without the package

test_compat: $(VENV)/.built $(VENV)/.test
	$(PYTEST) $(if $(SHORT),$(COMPAT_SHORT),$(COMPAT_TESTS)) $(PYTEST_ARGS)

bench: $(VENV)/.built $(VENV)/.bench build/objects/.testing  ## compare with other libraries, several minutes; BENCH_ARGS for compare.py
	mkdir -p build/bench
	$(BIN)/python benchmarks/compare.py large --json build/bench/large.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/compare.py small --json build/bench/small.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/plot.py build/bench/large.json build/bench/small.json --output build/bench/compare.png

bench-all: $(VENV)/.built $(VENV)/.bench build/objects/.testing  ## the figures that we hold, in one file; benchmarks/compare_runs.py compares two of them
	$(BIN)/python benchmarks/bench_all.py $(BENCH_ARGS)

gpu-wheels: $(DEPENDENCIES)  ## fetch what tests/gpu/run.py takes to a machine with a GPU and without network
	$(BIN)/python tests/gpu/run.py --prepare

gpu-rehearsal: $(VENV)/.built $(VENV)/.test $(VENV)/.bench  ## all steps of tests/gpu/run.py, without a GPU
	MAX_JOBS=$(JOBS) $(BIN)/python tests/gpu/run.py --rehearse

docs: $(VENV)/.built $(VENV)/.docs  ## the documentation, to build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees -b html docs build/docs

# torch's own libraries are found where torch is. The label of the version says for which torch it was built.
wheel: $(VENV)/.built $(VENV)/.wheel  ## a wheel for this Python and this torch, to build/wheels; tried without a compiler
	rm -rf build/wheels build/plain_wheel
	mkdir -p build/plain_wheel
	printf '[build]\nbuild_lib = build/plain_wheel/lib\n[egg_info]\ntag_build = +torch%s\n' \
	  $$($(BIN)/python -c 'import torch; print(*torch.__version__.split(".")[:2], sep=".")') > build/plain_wheel/label.cfg
	DIST_EXTRA_CONFIG=$(CURDIR)/build/plain_wheel/label.cfg MAX_JOBS=$(JOBS) $(BIN)/pip wheel -q \
	  --disable-pip-version-check --no-build-isolation --no-deps -w build/plain_wheel .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair -w build/wheels \
	  $(addprefix --exclude=,libc10.so libc10_cuda.so libtorch.so libtorch_cpu.so libtorch_cuda.so libtorch_python.so) \
	  build/plain_wheel/*.whl
	$(BIN)/python tests/packaging/try_wheel.py build/wheels/*.whl

# One environment after the other, each removed before the next; never more than 12 GB of disk.
WHEELS ?= $(foreach torch,2.13.0 2.14.1 2.15.0,$(foreach python,3.11 3.12 3.13,$(torch)-python$(python)))
wheels:  ## the files of a release, to build/release: sdist, and wheels for each of WHEELS; goes on if interrupted
	JOBS=$(JOBS) $(PYTHON) tests/packaging/make_wheels.py $(WHEELS)

sdist: $(DEPENDENCIES)  ## the sources of the commit as a package, to build/sdist; installed from it, and tried
	MAX_JOBS=$(JOBS) $(BIN)/python tests/packaging/make_sdist.py $(or $(CHECKOUT),.) $(or $(COMMIT),HEAD) build/sdist

torture: $(VENV)/.built $(VENV)/.test $(VENV)/.optimizers build/objects/.testing build/failpoints/.built  ## all tests, those of hours too: every fault at every point
	BCP_LONG=1 $(PYTEST) $(PYTEST_ARGS)
	$(MAKE) -j$(JOBS) -f tests/cpp/build.mk VARIANT=plain all
	BCP_LONG=1 build/cpp/plain/run_tests -tc='power_loss*'

fuzz:  ## every parser under libFuzzer, FUZZ_SECONDS each; needs clang
	$(MAKE) -j$(JOBS) -f tests/fuzz/build.mk all
	$(MAKE) -f tests/fuzz/build.mk fuzz SECONDS=$(or $(FUZZ_SECONDS),60)

lint: $(VENV)/.built $(VENV)/.test build/objects/.testing  ## all hooks of .pre-commit-config.yaml, on all files
	$(BIN)/pre-commit run --all-files

# A layer is one unit here, which takes a tenth of the time of its sources one by one.
tidy: $(VENV)/.built $(VENV)/.test  ## clang-tidy over csrc
	mkdir -p build/tidy
	for layer in $(filter-out csrc/README.md,$(wildcard csrc/*)); do \
	  unit=build/tidy/$$(basename $$layer).cpp; \
	  printf '#include "%s"\n' $$(find $$layer -name '*.cpp' | sort) > $$unit; \
	  echo $$unit; \
	done | xargs -P $(JOBS) -I {} $(BIN)/clang-tidy --quiet {} -- -std=c++20 -I. -D_GNU_SOURCE \
	  $$($(BIN)/python -c "import pathlib, sysconfig, torch; \
	    print('-isystem', pathlib.Path(torch.__file__).parent / 'include', '-isystem', sysconfig.get_path('include'))")

format: $(VENV)/.test  ## rewrite sources in the house style
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff check --fix $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)

sanitize:  ## the C++ core and its tests under ASan+UBSan and under TSan; needs doctest, not Python
	$(MAKE) -j$(JOBS) -f tests/cpp/build.mk VARIANT=asan all
	$(MAKE) -j$(JOBS) -f tests/cpp/build.mk VARIANT=tsan all
	$(MAKE) -j$(JOBS) --output-sync=target run_asan run_tsan

run_asan run_tsan: run_%:
	$(MAKE) -f tests/cpp/build.mk VARIANT=$* test

# Whatever is started meanwhile has the sanitizers, and finds this package first. Python, and torch, leak at exit.
sanitize-python: $(VENV)/.built $(VENV)/.test build/asan/.built  ## the extension modules under ASan+UBSan; SANITIZE_TESTS, else unit
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH=$(CURDIR)/build/asan/lib PYTHONSAFEPATH=1 \
	  $(PYTEST) $(or $(SANITIZE_TESTS),tests/unit) $(PYTEST_ARGS)

build: $(VENV)/.built  ## the virtual environment with the package in it

clean:  ## remove everything that was built
	rm -rf $(VENV) build *.egg-info bytecheckpoint/*.so

# Names the packages in groups of dependencies.
packages_of = $(BIN)/python -c "import tomllib; \
  settings = tomllib.load(open('pyproject.toml', 'rb')); \
  groups = settings['project']['optional-dependencies'] | settings['dependency-groups']; \
  print(*(package for name in '$(1)'.split() for package in groups[name]))"

# torch comes first and by itself, and is named again, so that nothing else chooses its version.
$(DEPENDENCIES): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(TORCH)" "setuptools>=77" wheel ninja || \
	  { echo "$(TORCH) cannot be installed with $$($(BIN)/python -V); pip says above which versions can" >&2; exit 2; }
	$(PIP_INSTALL) "$(TORCH)" $$($(call packages_of,own demo))
	touch $@

# What the demo does without, by what needs it. The torch that is there is named again, so that it stays.
GROUPS_test = test lint frameworks $(OLMO)
GROUPS_bench = bench
GROUPS_docs = docs
GROUPS_wheel = wheel
GROUPS_optimizers = optimizers
$(VENV)/.test $(VENV)/.bench $(VENV)/.docs $(VENV)/.wheel $(VENV)/.optimizers: $(VENV)/.%: $(DEPENDENCIES)
	$(PIP_INSTALL) "$(TORCH)" $$($(call packages_of,$(GROUPS_$*)))
	touch $@

$(VENV)/.built: $(DEPENDENCIES) setup.py $(SOURCES)
	MAX_JOBS=$(JOBS) $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

# The module for tests and benchmarks alone, beside the sources: an editable install imports it from there.
build/objects/.testing: $(VENV)/.built
	MAX_JOBS=$(JOBS) BCP_BUILD_VARIANT=testing $(BIN)/python setup.py -q build_ext --inplace > build/testing.log 2>&1 || \
	  (tail -30 build/testing.log; false)
	touch $@

# The same package with failpoints in it, for the crash tests alone; and with sanitizers, for sanitize-python.
build/failpoints/.built build/asan/.built: build/%/.built: $(VENV)/.built $(shell find bytecheckpoint -name '*.py')
	mkdir -p build
	MAX_JOBS=$(JOBS) BCP_BUILD_VARIANT=$* $(BIN)/python setup.py -q build --build-lib build/$*/lib \
	  > build/$*.log 2>&1 || (tail -30 build/$*.log; false)
	touch $@
endif

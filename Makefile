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
DEPENDENCIES := $(VENV)/.dependencies-$(TORCH)
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu')
CXX_FILES := $(shell find csrc tests/cpp tests/cuda tests/fuzz -name '*.cpp' -o -name '*.h' -o -name '*.cu')
PY_DIRS := bytecheckpoint tests demo benchmarks setup.py

.PHONY: help demo test compat torture fuzz bench lint format sanitize sanitize-python run_asan run_tsan build clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

include tests/compat.mk

ifndef IN_A_COPY
demo: $(VENV)/.built  ## train, save, reshard, resume, and compare with stock DCP
	$(BIN)/python demo/train_and_resume.py

test: $(VENV)/.built build/failpoints/.built  ## all tests
	MAX_JOBS=$(JOBS) $(PYTEST) $(PYTEST_ARGS)

test_compat: $(VENV)/.built
	$(PYTEST) $(COMPAT_TESTS) $(PYTEST_ARGS)

bench: $(VENV)/.built $(VENV)/.bench  ## compare with other libraries, several minutes; BENCH_ARGS for compare.py
	mkdir -p build/bench
	$(BIN)/python benchmarks/compare.py large --json build/bench/large.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/compare.py small --json build/bench/small.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/plot.py build/bench/large.json build/bench/small.json --output build/bench/compare.png

torture: $(VENV)/.built build/failpoints/.built  ## every fault at every point, in hours: kills, power, disk errors, damage
	BCP_LONG=1 $(PYTEST) tests/faults tests/model tests/distributed/test_lost_ranks.py \
	  tests/distributed/test_ends_of_ranks.py tests/distributed/test_life_at_random.py tests/fuzz tests/frameworks $(PYTEST_ARGS)
	$(MAKE) -j$(JOBS) -f tests/cpp/build.mk VARIANT=plain all
	BCP_LONG=1 build/cpp/plain/run_tests -tc='power_loss*'

fuzz:  ## every parser under libFuzzer, FUZZ_SECONDS each; needs clang
	$(MAKE) -j$(JOBS) -f tests/fuzz/build.mk all
	$(MAKE) -f tests/fuzz/build.mk fuzz SECONDS=$(or $(FUZZ_SECONDS),60)

lint: $(VENV)/.built  ## formatting, types, layers
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/lint -q

format: $(VENV)/.built  ## rewrite sources in the house style
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
sanitize-python: $(VENV)/.built build/asan/.built  ## the extension modules under ASan+UBSan; SANITIZE_TESTS, else unit
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH=$(CURDIR)/build/asan/lib PYTHONSAFEPATH=1 \
	  $(PYTEST) $(or $(SANITIZE_TESTS),tests/unit) $(PYTEST_ARGS)

build: $(VENV)/.built  ## the virtual environment with the package in it

clean:  ## remove everything that was built
	rm -rf $(VENV) build *.egg-info bytecheckpoint/*.so

# Names the packages in groups of optional dependencies; of the group `own`, what the package itself needs besides torch.
packages_of = $(BIN)/python -c "import tomllib; \
  project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
  own = [package for package in project['dependencies'] if not package.startswith('torch')]; \
  groups = project['optional-dependencies'] | {'own': own}; \
  print(*(package for name in '$(1)'.split() for package in groups[name]))"

# torch comes first and by itself, and is named again, so that nothing else chooses its version.
$(DEPENDENCIES): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" "setuptools>=77" wheel ninja
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" $$($(call packages_of,own demo test lint frameworks $(OLMO)))
	touch $@

# Beside the rest, so that neither tests nor CI need them. The torch that is there is named again, so that it stays.
$(VENV)/.bench: $(DEPENDENCIES)
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" $$($(call packages_of,bench))
	touch $@

$(VENV)/.built: $(DEPENDENCIES) setup.py $(SOURCES)
	MAX_JOBS=$(JOBS) $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

# The same package with failpoints in it, for the crash tests alone; without checksums, for benchmarks/checks.py; and
# with sanitizers, for sanitize-python.
build/failpoints/.built build/nochecks/.built build/asan/.built: build/%/.built: $(VENV)/.built $(shell find bytecheckpoint -name '*.py')
	mkdir -p build
	MAX_JOBS=$(JOBS) BCP_BUILD_VARIANT=$* $(BIN)/python setup.py -q build --build-lib build/$*/lib \
	  > build/$*.log 2>&1 || (tail -30 build/$*.log; false)
	touch $@
endif

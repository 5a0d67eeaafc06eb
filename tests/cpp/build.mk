# SPDX-License-Identifier: Apache-2.0
# Builds csrc (without the bindings) and its doctest cases: make -f tests/cpp/build.mk VARIANT=plain|asan|tsan [test]
#
# Run from the root of the repository; everything lands in build/cpp/$(VARIANT). Failpoints are compiled in.

VARIANT ?= plain
CXX ?= g++
OUT := build/cpp/$(VARIANT)

FLAGS_plain :=
FLAGS_asan := -fsanitize=address -fno-sanitize-recover=all -fno-omit-frame-pointer
FLAGS_tsan := -fsanitize=thread
# What is tested is looked at by UBSan, too. In the macros of the tests it takes as long to compile as all the rest.
ALSO_asan = $(if $(filter csrc/%,$<),-fsanitize=undefined -fno-sanitize-recover=all)
LINK_asan := -fsanitize=undefined
# Compiling takes longer than running, three times as long if it optimizes under ASan and UBSan; not so under TSan.
OPTIMIZE_plain = $(if $(filter tests/%,$<),-O0,-O1)
OPTIMIZE_asan = $(if $(filter tests/%,$<),-O0,-Og)
OPTIMIZE_tsan := -O1
ifeq ($(filter $(VARIANT),plain asan tsan),)
$(error VARIANT=$(VARIANT): plain, asan and tsan are what there is)
endif

CPPFLAGS_ALL := -I. -D_GNU_SOURCE -DBCP_FAILPOINTS -DBCP_TEST_DATA='"$(CURDIR)/tests/cpp/data"' \
  -DBCP_FUZZ_DATA='"$(CURDIR)/tests/fuzz"' -MMD -MP
CXXFLAGS_ALL := -std=c++17 -g -fno-var-tracking -Wall -Wextra -Werror -pthread $(FLAGS_$(VARIANT)) $(CXXFLAGS)

LAYERS := base tensor format planner io staging engine
# A layer may have subfolders, of one level (tests/lint/test_layers.py).
sources_of = $(sort $(wildcard csrc/$(1)/*.cpp csrc/$(1)/*/*.cpp))
SOURCES := $(sort $(foreach layer,$(LAYERS),$(call sources_of,$(layer))))
# One source a layer that includes all of it takes a quarter of the time, and hides an include that is missing: the other
# variants compile each by itself.
UNITS_tsan := $(LAYERS:%=$(OUT)/units/%.cpp)
# The properties that fuzzing tries are replayed here; driver.cpp is libFuzzer's.
PROPERTIES := $(filter-out tests/fuzz/driver.cpp,$(wildcard tests/fuzz/*.cpp))
# Some layers know no threads (tests/lint/test_layers.py), so TSan sees nothing in their tests: those whose first header
# of csrc is theirs.
LEFT_OUT_tsan := tests/cpp/test_fuzz_replay.cpp $(PROPERTIES) $(shell awk -F/ \
  '/^#include "csrc/ && !n[FILENAME]++ && $$2 ~ /^(tensor|format|planner)$$/ { print FILENAME }' tests/cpp/test_*.cpp)
TESTS := $(sort $(filter-out $(LEFT_OUT_$(VARIANT)),$(wildcard tests/cpp/*.cpp) $(PROPERTIES)))
OBJECTS := $(patsubst %.cpp,$(OUT)/%.o,$(or $(UNITS_$(VARIANT):$(OUT)/%=%),$(SOURCES)) $(TESTS))

# Where address space is randomised more widely than TSan's shadow allows, it refuses to start.
RUN_tsan := $(shell command -v setarch >/dev/null 2>&1 && setarch -R true 2>/dev/null && echo setarch -R)
export ASAN_OPTIONS ?= detect_leaks=1:strict_string_checks=1
export UBSAN_OPTIONS ?= print_stacktrace=1
export TSAN_OPTIONS ?= halt_on_error=1

.PHONY: all test clean doctest_is_there
all: $(OUT)/run_tests

test: all
	$(RUN_$(VARIANT)) $(OUT)/run_tests $(ARGS)

# The object of main.cpp stands for "doctest was there": a build that has it needs no second look.
doctest_is_there:
	@printf '#include <doctest/doctest.h>\n' | $(CXX) -std=c++17 -I. $(CXXFLAGS) -E -x c++ - >/dev/null 2>&1 || { \
	  echo '*****************************************************************************' >&2; \
	  echo '*** doctest/doctest.h is missing: THE C++ TESTS ARE NOT BUILT AND NOT RUN.  ***' >&2; \
	  echo '*** Install it, for instance with: apt-get install doctest-dev              ***' >&2; \
	  echo '*****************************************************************************' >&2; \
	  exit 3; }

$(OUT)/run_tests: $(OBJECTS)
	$(CXX) $(CXXFLAGS_ALL) $(LINK_$(VARIANT)) $(OBJECTS) -o $@

$(UNITS_$(VARIANT)): $(OUT)/units/%.cpp: tests/cpp/build.mk
	@mkdir -p $(@D)
	printf '#include "%s"\n' $(call sources_of,$*) > $@

$(UNITS_$(VARIANT):.cpp=.o): %.o: %.cpp | doctest_is_there
	$(CXX) $(CPPFLAGS_ALL) $(CXXFLAGS_ALL) $(OPTIMIZE_$(VARIANT)) -c $< -o $@

$(OUT)/%.o: %.cpp tests/cpp/build.mk | doctest_is_there
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS_ALL) $(CXXFLAGS_ALL) $(ALSO_$(VARIANT)) $(OPTIMIZE_$(VARIANT)) -c $< -o $@

clean:
	rm -rf $(OUT)

-include $(OBJECTS:.o=.d)

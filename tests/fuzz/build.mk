# SPDX-License-Identifier: Apache-2.0
# Fuzzes the parsers with clang's libFuzzer, one program a target: make -f tests/fuzz/build.mk fuzz TARGET=manifest SECONDS=60
#
# Run from the root of the repository; everything lands in build/fuzz. Needs clang and its runtime
# (apt-get install clang-14 libclang-rt-14-dev). tests/fuzz/README.md says what the targets are.

CLANG ?= $(firstword $(foreach name,clang++ $(addprefix clang++-,19 18 17 16 15 14),$(shell command -v $(name))))
CLANG_LAUNCHER ?=
# llvm-cov-14 of clang++-14
LLVM := $(dir $(CLANG))llvm-
LLVM_VERSION := $(patsubst clang++%,%,$(notdir $(CLANG)))
OUT := build/fuzz
SECONDS ?= 60
RUNS ?= -1
# A leak is looked for at the end of a run and where an input left more than it found.
OPTIONS ?= -timeout=10 -rss_limit_mb=2048 -print_final_stats=1

TARGETS := $(sort $(patsubst tests/fuzz/fuzz_%.cpp,%,$(wildcard tests/fuzz/fuzz_*.cpp)))
TARGET ?= $(TARGETS)

CPPFLAGS_ALL := -I. -D_GNU_SOURCE -MMD -MP
CXXFLAGS_ALL := -std=c++17 -g -O1 -fno-omit-frame-pointer -Wall -Wextra -Werror -pthread \
  -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all
# Of the doctest cases that replay corpora and findings.
COVERED := -std=c++17 -g -O0 -pthread -fprofile-instr-generate -fcoverage-mapping \
  -DBCP_FUZZ_DATA='"$(CURDIR)/tests/fuzz"' -DBCP_TEST_DATA='"$(CURDIR)/tests/cpp/data"'

SOURCES := $(sort $(foreach layer,base tensor format planner,$(wildcard csrc/$(layer)/*.cpp csrc/$(layer)/*/*.cpp)))
PROPERTIES := $(sort $(filter-out tests/fuzz/driver.cpp,$(wildcard tests/fuzz/*.cpp)))
OBJECTS := $(patsubst %.cpp,$(OUT)/%.o,$(SOURCES) $(PROPERTIES))
DRIVERS := $(patsubst %,$(OUT)/driver_%.o,$(TARGETS))
PROGRAMS := $(addprefix $(OUT)/,$(TARGETS))

export ASAN_OPTIONS ?= detect_leaks=1:strict_string_checks=1:allocator_may_return_null=0
export UBSAN_OPTIONS ?= print_stacktrace=1

.PHONY: all fuzz corpus coverage clang_is_there clean
all: $(PROGRAMS)

# Every target for SECONDS each, from the committed corpus and what earlier runs added to build/fuzz/corpus.
fuzz: $(addprefix $(OUT)/,$(TARGET))
	python3 tests/fuzz/corpus.py unpack $(OUT)/corpus $(TARGET)
	@for target in $(TARGET); do mkdir -p $(OUT)/found/$$target; \
	  echo "== $$target"; \
	  $(OUT)/$$target $(OUT)/corpus/$$target $$(ls -d tests/fuzz/findings/$$target 2>/dev/null) -artifact_prefix=$(OUT)/found/$$target/ \
	    $$(case $$target in pickle_*|*_archive|foreign_*) echo -dict=tests/fuzz/pickle.dict;; esac) \
	    -max_total_time=$(SECONDS) -runs=$(RUNS) $(OPTIONS) || exit 1; done

# What earlier runs added, as far as it reaches what nothing smaller does, becomes the committed corpus.
corpus: $(addprefix $(OUT)/,$(TARGET))
	@for target in $(TARGET); do rm -rf $(OUT)/merged/$$target; mkdir -p $(OUT)/merged/$$target; \
	  $(OUT)/$$target -merge=1 -max_len=16384 $(OUT)/merged/$$target $(OUT)/corpus/$$target \
	    >$(OUT)/merged/$$target.log 2>&1 || { tail -20 $(OUT)/merged/$$target.log; exit 1; }; done
	python3 tests/fuzz/corpus.py pack $(OUT)/merged $(TARGET)

# Lines that the committed corpora and findings reach, file by file.
coverage: $(OUT)/covered
	LLVM_PROFILE_FILE=$(OUT)/covered.raw $(OUT)/covered -tc='fuzz:*'
	$(LLVM)profdata$(LLVM_VERSION) merge -o $(OUT)/covered.data $(OUT)/covered.raw
	$(LLVM)cov$(LLVM_VERSION) report $(OUT)/covered -instr-profile=$(OUT)/covered.data csrc/base csrc/format csrc/planner

clang_is_there:
	@test -n "$(CLANG)" || { echo '*** clang is missing: apt-get install clang-14 libclang-rt-14-dev' >&2; exit 3; }

$(PROGRAMS): $(OUT)/%: $(OUT)/driver_%.o $(OBJECTS)
	$(CLANG) $(CXXFLAGS_ALL) -fsanitize=fuzzer $^ -o $@

$(DRIVERS): $(OUT)/driver_%.o: tests/fuzz/driver.cpp | clang_is_there
	@mkdir -p $(@D)
	$(CLANG_LAUNCHER) $(CLANG) $(CPPFLAGS_ALL) -DBCP_FUZZ_TARGET='"$*"' $(CXXFLAGS_ALL) -c $< -o $@

$(OUT)/%.o: %.cpp | clang_is_there
	@mkdir -p $(@D)
	$(CLANG_LAUNCHER) $(CLANG) $(CPPFLAGS_ALL) $(CXXFLAGS_ALL) -c $< -o $@

clean:
	rm -rf $(OUT)

REPLAY := tests/cpp/main.cpp tests/cpp/test_fuzz_replay.cpp
$(OUT)/covered: $(patsubst %.cpp,$(OUT)/covered.o/%.o,$(SOURCES) $(PROPERTIES) $(REPLAY))
	$(CLANG) $(COVERED) $^ -o $@

$(OUT)/covered.o/%.o: %.cpp | clang_is_there
	@mkdir -p $(@D)
	$(CLANG_LAUNCHER) $(CLANG) $(CPPFLAGS_ALL) $(COVERED) -c $< -o $@

-include $(OBJECTS:.o=.d) $(DRIVERS:.o=.d)

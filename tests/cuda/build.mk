# SPDX-License-Identifier: Apache-2.0
# Builds DeviceMerge with nvcc, and links it, and all of csrc below the bindings, with a stand-in for the CUDA runtime:
# make -f tests/cuda/build.mk VARIANT=plain|asan [test_cuda]
#
# No device is needed, nor does one take part. Run from the root of the repository. What is not of CUDA is built as for
# tests/cpp, and once for both.

.DEFAULT_GOAL := all_cuda
include tests/cpp/build.mk

NVCC ?= nvcc
# Of any one device: what runs is the code for the host beside it.
ARCHITECTURE := $(lastword $(shell $(NVCC) --list-gpu-arch 2>/dev/null))
TOP := $(shell $(NVCC) --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^\#$$ TOP=//p')
CUDA_INCLUDE := $(firstword $(wildcard $(TOP)/include $(TOP)/targets/*/include))

CUDA_TESTS := $(patsubst %.cpp,$(OUT)/%.o,$(wildcard tests/cuda/*.cpp))
# What stands in for device code is left out.
CUDA_OBJECTS := $(patsubst %.cpp,$(OUT)/%.o,$(filter-out %/no_device_merge.cpp,$(SOURCES)) tests/cpp/main.cpp) \
  $(CUDA_TESTS) $(OUT)/csrc/staging/cuda_device_merge.o

.PHONY: all_cuda test_cuda
all_cuda: $(OUT)/run_cuda_tests

test_cuda: all_cuda
	$(OUT)/run_cuda_tests $(ARGS)

$(OUT)/run_cuda_tests: $(CUDA_OBJECTS)
	$(CXX) $(CXXFLAGS_ALL) $(LINK_$(VARIANT)) $^ -o $@

# The stand-in moves the bytes, so these run five times as long if it is not optimized.
$(CUDA_TESTS): OPTIMIZE_$(VARIANT) := -O1
$(CUDA_TESTS): CPPFLAGS_ALL += -isystem $(CUDA_INCLUDE)

$(OUT)/%.o: %.cu tests/cuda/build.mk
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -g -I. -D_GNU_SOURCE -O1 -arch=$(ARCHITECTURE) '-DBCP_CUDA_ARCHITECTURES="$(ARCHITECTURE)"' -diag-suppress 2810 \
	  -MMD -MP -c $< -o $@

-include $(CUDA_TESTS:.o=.d) $(OUT)/csrc/staging/cuda_device_merge.d

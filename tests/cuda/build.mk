# SPDX-License-Identifier: Apache-2.0
# Builds DeviceMerge with nvcc, and links it with a stand-in for the CUDA runtime: make -f tests/cuda/build.mk [test]
#
# No device is needed, nor does one take part. Run from the root of the repository; everything lands in build/cuda.

CXX ?= g++
NVCC ?= nvcc
OUT := build/cuda
# Of any one device: what runs is the code for the host beside it.
ARCHITECTURE := $(lastword $(shell $(NVCC) --list-gpu-arch 2>/dev/null))
TOP := $(shell $(NVCC) --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^\#$$ TOP=//p')
CUDA_INCLUDE := $(firstword $(wildcard $(TOP)/include $(TOP)/targets/*/include))

SOURCES := $(addprefix csrc/base/,bytes.cpp status.cpp) $(wildcard csrc/tensor/*.cpp) \
  $(addprefix csrc/staging/,copy_rects.cpp device_gather.cpp element_layout.cpp joined_dims.cpp pack_plan.cpp \
    pages.cpp shared_device_merge.cpp) \
  $(wildcard tests/cuda/*.cpp) tests/cpp/main.cpp
OBJECTS := $(SOURCES:%.cpp=$(OUT)/%.o) $(OUT)/csrc/staging/cuda_device_merge.o
FLAGS := -std=c++17 -g -O1 -I. -D_GNU_SOURCE

.PHONY: all test clean
all: $(OUT)/run_tests

test: all
	$(OUT)/run_tests $(ARGS)

$(OUT)/run_tests: $(OBJECTS)
	$(CXX) -pthread $^ -o $@

$(OUT)/%.o: %.cpp tests/cuda/build.mk
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) -isystem $(CUDA_INCLUDE) -Wall -Wextra -Werror -pthread -MMD -MP $(CXXFLAGS) -c $< -o $@

$(OUT)/%.o: %.cu tests/cuda/build.mk
	@mkdir -p $(@D)
	$(NVCC) $(FLAGS) -arch=$(ARCHITECTURE) '-DBCP_CUDA_ARCHITECTURES="$(ARCHITECTURE)"' -diag-suppress 2810 \
	  -MMD -MP -c $< -o $@

clean:
	rm -rf $(OUT)

-include $(OBJECTS:.o=.d)

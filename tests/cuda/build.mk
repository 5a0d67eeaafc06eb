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

# One source a layer takes a quarter of the time of all by themselves. What stands in for device code is left out.
LAYERS := base tensor format planner io staging engine
UNITS := $(LAYERS:%=$(OUT)/units/%.cpp)
TESTS := $(wildcard tests/cuda/*.cpp) tests/cpp/main.cpp
OBJECTS := $(UNITS:.cpp=.o) $(TESTS:%.cpp=$(OUT)/%.o) $(OUT)/csrc/staging/cuda_device_merge.o
FLAGS := -std=c++17 -g -fno-var-tracking -I. -D_GNU_SOURCE
CXX_COMMAND = $(CXX) $(FLAGS) -isystem $(CUDA_INCLUDE) -Wall -Wextra -Werror -pthread -MMD -MP $(CXXFLAGS) -c $< -o $@

.PHONY: all test clean
all: $(OUT)/run_tests

test: all
	$(OUT)/run_tests $(ARGS)

$(OUT)/run_tests: $(OBJECTS)
	$(CXX) -pthread $^ -o $@

$(UNITS): $(OUT)/units/%.cpp: tests/cuda/build.mk
	@mkdir -p $(@D)
	printf '#include "%s"\n' $(sort $(filter-out %/no_device_merge.cpp,$(wildcard csrc/$*/*.cpp))) > $@

$(UNITS:.cpp=.o): %.o: %.cpp
	$(CXX_COMMAND) -O1

$(OUT)/%.o: %.cpp tests/cuda/build.mk
	@mkdir -p $(@D)
	$(CXX_COMMAND) -O1

$(OUT)/%.o: %.cu tests/cuda/build.mk
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -g -I. -D_GNU_SOURCE -O1 -arch=$(ARCHITECTURE) '-DBCP_CUDA_ARCHITECTURES="$(ARCHITECTURE)"' -diag-suppress 2810 \
	  -MMD -MP -c $< -o $@

clean:
	rm -rf $(OUT)

-include $(OBJECTS:.o=.d)

# SPDX-License-Identifier: Apache-2.0
# Other versions of torch and Python than the Makefile's own: a copy of the checkout for each, in build/with, so that none
# displaces another. `make test TORCH=torch==2.11.0 PYTHON=python3.12`, and so with the other targets below.

# The range, the last patch of each version, and the Python that each is tried with.
VERSIONS := 2.10.0-python3.12 2.11.0-python3.12 2.12.1-python3.13 2.13.0-python3.11 2.14.1-python3.13 2.15.0-python3.11
# OLMo-core 3.0.0 wants one of these.
OLMO := $(if $(filter torch==2.10.% torch==2.11.% torch==2.12.% torch==2.13.%,$(TORCH)),olmo)

# What meets torch: hooks, planners, staging, groups, both directions with stock DCP, adapters.
COMPAT_TESTS := tests/interop $(addprefix tests/frameworks/test_,olmo*.py torchtitan_*.py) \
  $(addprefix tests/unit/test_,builtin_objects.py call_context.py calls.py load_planner.py nested_saves.py objects.py \
    plain_calls.py planner_memory.py public_names.py round_trip.py save_planner.py staged_saves.py stager.py \
    state_dicts.py stateful.py writer_arguments.py) \
  $(addprefix tests/distributed/test_,async_save.py group_life.py groups.py in_step.py marked_parts.py peers.py \
    plain_calls_of_ranks.py plan_exchange.py planner_memory.py registered_saves.py resharding.py save_process.py \
    state_dicts.py)
# What shows most of it, with SHORT=1, as in CI.
COMPAT_SHORT := $(addprefix tests/interop/test_,golden.py stock_golden.py stock.py) tests/frameworks/test_olmo*.py \
  $(addprefix tests/unit/test_,plain_calls.py public_names.py save_planner.py stateful.py load_planner.py stager.py) \
  $(addprefix tests/distributed/test_,async_save.py groups.py plain_calls_of_ranks.py registered_saves.py state_dicts.py)

# Where pyenv has several versions of Python all of them are to be found, the usual one first.
export PYENV_VERSION := $(or $(PYENV_VERSION),$(shell ! command -v pyenv > /dev/null || \
  echo "$$(pyenv version-name):$$(pyenv versions --bare | paste -sd:)"))

.PHONY: compat environment test_compat $(addprefix compat-,$(VERSIONS))

compat:  ## what meets torch, tested with each version of the range
compat: $(addprefix compat-,$(VERSIONS))

$(addprefix compat-,$(VERSIONS)): compat-%:
	$(MAKE) test_compat TORCH=torch==$(firstword $(subst -, ,$*)) PYTHON=$(lastword $(subst -, ,$*))

compat-%:
	@echo '$@: make compat tries $(VERSIONS); make test_compat TORCH=torch==X PYTHON=pythonY any other' >&2; exit 2

ifneq ($(IS_COPY),yes)
ifneq ($(TORCH) $(PYTHON),$(NEWEST) python3)
IN_A_COPY := build/with/$(subst ==,-,$(TORCH))-$(notdir $(PYTHON))

# All that git knows or would take; nothing that is gone here, but what was built there.
demo test environment test_compat torture bench docs wheel build:
	@echo '$(TORCH)' | grep -Eqx 'torch==[0-9]+[.][0-9]+[.][0-9]+' || \
	  { echo 'TORCH=$(TORCH): a version of torch is wanted, as in TORCH=$(NEWEST)' >&2; exit 2; }
	@echo '$(TORCH)' | grep -Eqx 'torch==(2[.][1-9][0-9]+|[3-9][0-9]*)[.].*' || \
	  { echo 'TORCH=$(TORCH): too old, bytecheckpoint needs torch 2.10 or newer' >&2; exit 2; }
	@$(PYTHON) -c '' 2> /dev/null || { echo 'PYTHON=$(PYTHON): no such Python here' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'PYTHON=$(PYTHON): too old, bytecheckpoint needs Python 3.11 or newer' >&2; exit 2; }
	mkdir -p $(IN_A_COPY)
	find $(IN_A_COPY) \( -path $(IN_A_COPY)/build -o -path $(IN_A_COPY)/.venv \) -prune -o \
	  -type f ! -name '*.so' -exec rm -f {} +
	git ls-files -co --exclude-standard | while read -r name; do [ ! -e "$$name" ] || echo "$$name"; done | \
	  tar -c -T - | tar -x -C $(IN_A_COPY)
	$(MAKE) -C $(IN_A_COPY) IS_COPY=yes $@
endif
endif

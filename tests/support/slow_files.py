# SPDX-License-Identifier: Apache-2.0
"""The files of tests that take longest."""

from __future__ import annotations

__all__ = ["SLOWEST_FIRST"]

# Workers get these files first, in this order, and then the others as they were collected. If one of these began last,
# all other workers would wait for it.
SLOWEST_FIRST = (
    "unit/test_ends.py",
    "unit/test_lives_of_calls.py",
    "unit/test_cpp.py",
    "frameworks/test_demos.py",
    "ground/test_two_machines.py",
    "browser/test_report_page.py",
    "distributed/test_first_calls.py",
    "frameworks/test_torchtitan_trainer.py",
    "unit/test_cuda_on_host.py",
    "distributed/test_group_life.py",
    "storage/test_store_faults.py",
    "frameworks/test_recipes.py",
    "distributed/test_ends_of_ranks.py",
    "interop/test_pytorch_tests.py",
    "docs/test_snippets.py",
    "faults/test_error_at_calls.py",
    "faults/test_full_tmpfs.py",
    "faults/test_parts.py",
    "model/test_commit_model.py",
)

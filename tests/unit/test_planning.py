# SPDX-License-Identifier: Apache-2.0
"""Tests inventories and save plans as Python sees them. tests/cpp tests what planning decides."""

from __future__ import annotations

from typing import Any

import pytest

from bytecheckpoint import _testing
from bytecheckpoint.errors import CheckpointError


def entry(fqn: str, kind: str, sizes: list[int], *boxes: tuple[list[int], list[int]], **fields: Any) -> Any:
    return (
        fqn,
        kind,
        fields.get("path", b""),
        fields.get("can_split", True),
        fields.get("dtype", "float32"),
        sizes,
        list(boxes),
        fields.get("requires_grad", False),
        fields.get("pin_memory", False),
        fields.get("memory_format", 0),
    )


def inventories() -> list[_testing.Inventory]:
    """Returns those of two ranks: a plain tensor, shards, an object that only the second rank has."""
    return [
        _testing.Inventory.of_rank(
            rank,
            [
                entry("plain", "tensor", [1024, 256]),
                entry("shards", "shard", [4, 2], ([2 * rank, 0], [2, 2])),
                *([entry("object", "bytes", [], path=b"a way")] if rank == 1 else []),
            ],
        )
        for rank in (0, 1)
    ]


def test_a_save_is_planned_from_bytes_to_bytes() -> None:
    ranks = inventories()
    blobs = [inventory.encode() for inventory in ranks]
    merged = _testing.Inventory.merge(blobs)
    assert (merged.num_ranks, merged.num_entries, merged.num_boxes) == (2, 3, 4)
    assert _testing.Inventory.merge([merged.encode()]).encode() == merged.encode()
    merged.validate()
    plan = _testing.plan_save(merged)
    assert plan.summary() == {
        "num_ranks": 2,
        "num_chunks": 5,
        "num_splits": 1,
        "total_bytes": (1 << 20) + 32,
        "max_bytes": max(plan.rank_bytes),
    }
    chunks = dict(plan.chunks())
    assert list(chunks) == ["plain", "shards", "object"]
    assert chunks["shards"] == [(0, [0, 0], [2, 2]), (1, [2, 0], [2, 2])]
    assert chunks["object"] == [(1, [], [])]
    written = [
        _testing.apply_assignment(_testing.Inventory.merge([blobs[rank]]), plan.assignment(rank)) for rank in (0, 1)
    ]
    assert written[0] == [
        ("plain", [0, 0], chunks["plain"][0][2], False),
        ("shards", [0, 0], [2, 2], True),
    ]
    assert [fqn for fqn, *_ in written[1]] == ["plain", "shards", "object"]
    with pytest.raises(IndexError):
        plan.assignment(2)


def test_everything_on_the_lowest_rank_if_asked() -> None:
    plan = _testing.plan_save(
        _testing.Inventory.merge(inventory.encode() for inventory in inventories()), dedup_to_lowest_rank=True
    )
    assert plan.rank_bytes == [(1 << 20) + 16, 16]
    assert plan.summary()["num_splits"] == 0


def test_refusals_are_typed_errors() -> None:
    first, second = (inventory.encode() for inventory in inventories())
    with pytest.raises(CheckpointError, match="rank 1 is in two inventories"):
        _testing.Inventory.merge([second, second])
    with pytest.raises(CheckpointError, match="damaged at byte"):
        _testing.Inventory.merge([first[:-1]])
    with pytest.raises(CheckpointError, match="rank 0 is missing"):
        _testing.plan_save(_testing.Inventory.merge([second]))
    with pytest.raises(CheckpointError, match="no tensor has dtype"):
        _testing.Inventory.of_rank(0, [entry("w", "tensor", [1], dtype="float33")])
    with pytest.raises(ValueError, match="kind 'file'"):
        _testing.Inventory.of_rank(0, [entry("w", "file", [1])])
    overlapping = _testing.Inventory.of_rank(0, [entry("w", "shard", [4], ([0], [3]), ([2], [2]))])
    with pytest.raises(CheckpointError, match=r"'w'.* overlap"):
        overlapping.validate()

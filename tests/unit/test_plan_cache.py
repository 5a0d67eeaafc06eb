# SPDX-License-Identifier: Apache-2.0
"""Tests what the cache keeps of plans, and what tells plans apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytecheckpoint import BcpSavePlanner
from bytecheckpoint.native import _C
from bytecheckpoint.planning.inventory import LocalInventory
from bytecheckpoint.planning.plan_cache import CachedPlan, EncodedAssignment, PlanCache, digest_of
from bytecheckpoint.planning.plan_items import source_of
from bytecheckpoint.tensors.chunks import LocalChunks


def planned(num_items: int = 1, blobs: dict[bytes, bytes] | None = None) -> CachedPlan:
    return CachedPlan([EncodedAssignment(b"", num_items)], _C.without_records({}), blobs or {})


def test_plans_that_were_used_last_are_kept() -> None:
    cache = PlanCache()
    plans = {key: planned(blobs={key + b" digest": key + b" blob"}) for key in (b"a", b"b", b"c")}
    cache.keep_plan(b"a", plans[b"a"], 2)
    cache.keep_plan(b"b", plans[b"b"], 2)
    assert cache.plan(b"a") is plans[b"a"]
    cache.keep_plan(b"c", plans[b"c"], 2)
    assert (cache.plan(b"a"), cache.plan(b"b"), cache.plan(b"c")) == (plans[b"a"], None, plans[b"c"])
    assert cache.blob(b"a digest") == b"a blob"
    assert cache.blob(b"b digest") is None


def test_large_plans_are_not_all_kept() -> None:
    cache = PlanCache()
    cache.keep_plan(b"a", planned(3_000_000), 8)
    assert cache.plan(b"a") is not None
    cache.keep_plan(b"b", planned(3_000_000), 8)
    assert cache.plan(b"a") is None
    assert cache.plan(b"b") is not None
    cache.keep_plan(b"c", planned(5_000_000), 8)
    assert cache.plan(b"c") is not None, "the one that is in use is kept, however large"


def test_answers_are_those_to_the_same_inventory() -> None:
    cache = PlanCache()
    mine = {b"plan 1": EncodedAssignment(b"1", 1), b"plan 2": EncodedAssignment(b"2", 2)}
    cache.keep_assignments(b"mine", mine, 2)
    assert cache.take_assignments(b"mine") == mine
    assert cache.take_assignments(b"mine") == {}, "until they are kept again"
    cache.keep_assignments(b"mine", mine, 2)
    cache.keep_assignments(b"other", {b"plan 1": EncodedAssignment(b"3", 3)}, 2)
    assert cache.take_assignments(b"mine") == {b"plan 2": EncodedAssignment(b"2", 2)}
    assert cache.take_assignments(b"other") == {b"plan 1": EncodedAssignment(b"3", 3)}
    cache.keep_assignments(b"other", mine, 2)
    cache.clear()
    assert cache.take_assignments(b"other") == {}


def test_a_digest_knows_where_its_parts_end() -> None:
    assert digest_of([b"ab", b"c"]) != digest_of([b"a", b"bc"]) != digest_of([b"abc"])
    assert digest_of([b"ab", b"c"]) == digest_of(iter([b"ab", b"c"]))


def held_of(state: dict[str, Any], **settings: Any) -> LocalInventory:
    planner = BcpSavePlanner(**settings)
    planner.set_up_planner(state)
    held = source_of(planner.create_local_plan().items)
    assert isinstance(held, LocalInventory)
    return held


def base() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(4, 6), "b": torch.zeros(6)}, "step": 1}


CHANGES: dict[str, Any] = {
    "a name": {"model": {"v": torch.zeros(4, 6), "b": torch.zeros(6)}, "step": 1},
    "the way of a name": {"model.w": torch.zeros(4, 6), "model": {"b": torch.zeros(6)}, "step": 1},
    "a shape": {"model": {"w": torch.zeros(6, 4), "b": torch.zeros(6)}, "step": 1},
    "a dtype": {"model": {"w": torch.zeros(4, 6, dtype=torch.int32), "b": torch.zeros(6)}, "step": 1},
    "one less": {"model": {"w": torch.zeros(4, 6)}, "step": 1},
    "one more": {**base(), "lr": 0.1},
    "the order": {"step": 1, **base()},
    "an object for a tensor": {"model": {"w": 0, "b": torch.zeros(6)}, "step": 1},
    "a tensor for an object": {**base(), "step": torch.ones(())},
    "requires_grad": {"model": {"w": torch.zeros(4, 6, requires_grad=True), "b": torch.zeros(6)}, "step": 1},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_plan_is_made_of_tells_plans_apart(change: str) -> None:
    assert held_of(CHANGES[change]).digest != held_of(base()).digest


@pytest.mark.parametrize(
    "settings",
    [
        {"flatten_state_dict": False},
        {"flatten_sharded_tensors": False},
        {"dedup_save_to_lowest_rank": True},
    ],
)
def test_settings_tell_plans_apart(settings: dict[str, Any]) -> None:
    flat = {"w": torch.zeros(4, 6), "step": 1}
    assert held_of(flat, **settings).digest != held_of(flat).digest


class ResolvesItself(BcpSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


def test_who_can_split_boxes_tells_plans_apart_and_not_the_class() -> None:
    class Same(BcpSavePlanner):
        pass

    digests = []
    shards = LocalChunks((4, 6), [(0, 0)], [torch.zeros(4, 6)], torch.float32)
    for planner in (BcpSavePlanner(), Same(), ResolvesItself()):
        planner.set_up_planner({"w": shards})
        digests.append(source_of(planner.create_local_plan().items).digest)
    assert digests[0] == digests[1] != digests[2]


def test_values_do_not_tell_plans_apart() -> None:
    other = {"model": {"w": torch.ones(4, 6), "b": torch.ones(6)}, "step": "a much longer object than 1"}
    assert held_of(other).digest == held_of(base()).digest

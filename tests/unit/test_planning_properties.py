# SPDX-License-Identifier: Apache-2.0
"""Tests what must hold for every plan. Hypothesis draws what ranks hold, the extension plans, all in one process.

Ranks are simulated: see ``simulated_ranks`` for their DTensors and ``dcp_by_hand`` for the calls that DCP would make.
tests/cpp/test_save_plan.cpp tests random inventories, also of boxes that no mesh makes.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import raw
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from unit.dcp_by_hand import PlannedSave, load_by_hand, plan_by_hand, save_by_hand
from unit.simulated_ranks import Box, Layout, Spec, World, full, state_of, worlds

from bytecheckpoint import BcpLoadPlanner
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.native import _C

NOBODY = -1
MOST_OVER_MEAN = 1.02


def states_of(world: World) -> list[dict[str, Any]]:
    """Returns the state of each rank. Planning looks at no element, so tensors have full size but take no memory."""
    values = {
        fqn: fqn if spec.dtype is None else torch.empty((), dtype=spec.dtype).expand(spec.shape)
        for fqn, spec in world.specs.items()
    }
    return [state_of(world, rank, values) for rank in range(world.num_ranks)]


def box_of(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def writers_of(world: World, planned: PlannedSave) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Returns who writes each element of each tensor, and who writes each object.

    Asserts that no element is written twice, or by a rank that does not hold it.
    """
    elements = {fqn: np.full(spec.shape, NOBODY, np.int8) for fqn, spec in world.tensors()}
    objects: dict[str, list[int]] = {fqn: [] for fqn in world.objects()}
    for rank, plan in enumerate(planned.plans):
        for item in plan.items:
            fqn = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                objects[fqn].append(rank)
                continue
            held, box = world.box_of(fqn, rank), box_of(item)
            assert held is not None
            assert box.is_in(held)
            part = elements[fqn][box.selection()]
            assert (part == NOBODY).all()
            part[...] = rank
    return elements, objects


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_every_element_is_written_once_by_a_rank_that_holds_it(world: World) -> None:
    planned = plan_by_hand(states_of(world))
    elements, objects = writers_of(world, planned)
    assert all((writers != NOBODY).all() for writers in elements.values())
    assert objects == {fqn: [min(world.layouts[fqn].ranks)] for fqn in world.objects()}
    for mine, told in zip(planned.plans, planned.told, strict=True):
        assert list(mine.items) == list(told.items)
    # Stock readers use these chunks.
    written = [item for plan in planned.plans for item in plan.items]
    boxes = {fqn: sorted(box_of(item) for item in written if item.index.fqn == fqn) for fqn in elements}
    for fqn, spec in world.tensors():
        described = planned.metadata.state_dict_metadata[fqn]
        assert isinstance(described, TensorStorageMetadata)
        assert described.size == spec.shape
        assert sorted(Box(tuple(c.offsets), tuple(c.sizes)) for c in described.chunks) == boxes[fqn]
        assert len({box.offsets for box in boxes[fqn]}) == len(boxes[fqn])


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_the_lowest_holder_writes_all_if_asked(world: World) -> None:
    elements, objects = writers_of(world, plan_by_hand(states_of(world), dedup_save_to_lowest_rank=True))
    for fqn, spec in world.tensors():
        lowest = np.full(spec.shape, NOBODY, np.int8)
        for rank in reversed(range(world.num_ranks)):
            box = world.box_of(fqn, rank)
            if box is not None:
                lowest[box.selection()] = rank
        assert (elements[fqn] == lowest).all()
    assert objects == {fqn: [min(world.layouts[fqn].ranks)] for fqn in world.objects()}


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def check_reads(planner: BcpLoadPlanner) -> None:
    """Asserts that the plan fills each element of this rank from one place."""
    flat = planner.state_dict
    assert planner.metadata is not None
    items = _C.ReadPlan.of_state(checkpoint_of(planner.metadata), flat, _compat.chunks_of, False).items()
    filled = {fqn: np.zeros(local(value).shape, np.int8) for fqn, value in flat.items() if torch.is_tensor(value)}
    for item in items:
        if item.dest_index.fqn in filled:
            box = Box(tuple(item.dest_offsets), tuple(item.lengths))
            filled[item.dest_index.fqn][box.selection()] += 1
    assert all((count == 1).all() for count in filled.values())


@st.composite
def pairs_of_worlds(draw: st.DrawFn) -> tuple[World, World]:
    """Draws two worlds with the same contents."""
    saved = draw(worlds())
    return saved, draw(worlds(saved.specs))


@settings(max_examples=100, deadline=None)
@given(pairs_of_worlds())
def test_what_one_world_saves_another_loads(pair: tuple[World, World]) -> None:
    saved, loaded = pair
    values = {fqn: full(fqn, spec) for fqn, spec in saved.tensors()}
    # Each rank loads into views of whole tensors of its own: what lies around its shards must stay as it was.
    memory = [{fqn: full(fqn, spec, inverted=True) for fqn, spec in saved.tensors()} for _ in range(loaded.num_ranks)]
    objects: dict[str, Any] = {fqn: (fqn, 1, 2.5) for fqn in saved.objects()}
    got = [state_of(loaded, rank, {**mine, **dict.fromkeys(objects)}) for rank, mine in enumerate(memory)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        save_by_hand([state_of(saved, rank, values | objects) for rank in range(saved.num_ranks)], path)
        load_by_hand(got, path, check_reads)
    for rank, state in enumerate(got):
        for fqn, spec in loaded.tensors():
            wanted, box = full(fqn, spec, inverted=True), loaded.box_of(fqn, rank)
            if box is not None:
                wanted[box.selection()] = values[fqn][box.selection()]
            assert torch.equal(raw(memory[rank][fqn]), raw(wanted)), (rank, fqn)
        flat, _ = _C.flatten_state_dict(state)
        assert all(flat[fqn] == objects[fqn] for fqn in objects if loaded.box_of(fqn, rank) is not None)


def bytes_by_rank(world: World, planned: PlannedSave) -> list[int]:
    sums = [0] * world.num_ranks
    for rank, plan in enumerate(planned.plans):
        for item in plan.items:
            dtype = world.specs[item.index.fqn].dtype
            sums[rank] += math.prod(box_of(item).sizes) * dtype.itemsize if dtype is not None else 0
    return sums


@st.composite
def heavy_worlds(draw: st.DrawFn) -> World:
    """Draws replicas, and shards that have replicas: 24 MiB per rank, most of it in a few tensors, or in many."""
    axes = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    num_ranks = math.prod(axes)
    ranks = tuple(range(num_ranks))
    replicated = Layout(ranks, axes, (Replicate(), Replicate()))  # not plain: a plain tensor is never split
    sharded = Layout(ranks, axes, (Replicate(), Shard(0)))
    weights = [2**power for power in draw(st.lists(st.integers(0, 12), min_size=1, max_size=30))]
    specs, layouts = {}, {}
    for i, weight in enumerate(weights):
        row_bytes = draw(st.sampled_from([1 << 16, 4096, 24]))
        rows = (num_ranks * (24 << 20) * weight // sum(weights)) // row_bytes
        specs[f"w{i}"] = Spec((rows, row_bytes), torch.uint8)
        layouts[f"w{i}"] = draw(st.sampled_from([replicated, sharded]))
    return World(num_ranks, specs, layouts)


@settings(max_examples=100, deadline=None)
@given(heavy_worlds())
def test_replicas_are_written_in_equal_parts(world: World) -> None:
    num_bytes = bytes_by_rank(world, plan_by_hand(states_of(world)))
    # Only the ranks that have a replica of a shard can write it. If shards are uneven, even the best plan is.
    of_shards = [0.0] * world.num_ranks
    for fqn, layout in world.layouts.items():
        for rank in layout.ranks:
            box = world.box_of(fqn, rank)
            if Shard(0) in layout.placements and box is not None:
                of_shards[rank] += math.prod(box.sizes) / layout.axes[0]
    assert sum(num_bytes) == sum(spec.num_bytes for _, spec in world.tensors())
    assert max(num_bytes) <= MOST_OVER_MEAN * max(sum(num_bytes) / world.num_ranks, *of_shards)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 16), st.integers(0, 50), st.integers(1, 1000))
def test_ties_go_to_the_lower_rank(num_ranks: int, num_tensors: int, size: int) -> None:
    specs = {f"w{i}": Spec((size,), torch.float32) for i in range(num_tensors)}
    world = World(num_ranks, specs, dict.fromkeys(specs, Layout(tuple(range(num_ranks)))))
    elements, _ = writers_of(world, plan_by_hand(states_of(world)))
    assert [int(writers[0]) for writers in elements.values()] == [i % num_ranks for i in range(num_tensors)]


def shuffled(world: World, rank: int, state: dict[str, Any], random: Random) -> dict[str, Any]:
    """Returns ``state`` in another order. Keys that no lower rank has keep their order, which the metadata follows."""
    flat, _ = _C.flatten_state_dict(state)
    keys = random.sample(list(flat), len(flat))
    first = iter([fqn for fqn in flat if min(world.layouts[fqn].ranks) == rank])
    keys = [next(first) if min(world.layouts[fqn].ranks) == rank else fqn for fqn in keys]
    return {fqn: flat[fqn] for fqn in keys}


@settings(max_examples=100, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_plans_depend_on_what_ranks_hold_and_not_on_its_order(world: World, random: Random) -> None:
    plans = [plan_by_hand(states_of(world)) for _ in range(2)]
    assert [list(plan.items) for plan in plans[0].plans] == [list(plan.items) for plan in plans[1].plans]
    states = [shuffled(world, rank, state, random) for rank, state in enumerate(states_of(world))]
    once, again = writers_of(world, plans[0]), writers_of(world, plan_by_hand(states))
    assert once[1] == again[1]
    for fqn in once[0]:
        assert (once[0][fqn] == again[0][fqn]).all(), fqn

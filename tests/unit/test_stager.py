# SPDX-License-Identifier: Apache-2.0
"""Tests that ``BcpStager`` stages the state as it was."""

from __future__ import annotations

import collections
import copy
import errno
import multiprocessing
import resource
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_states import (
    LIMIT_S,
    MARKS,
    RAISES,
    broad,
    frozen,
    one,
    spoil,
)
from support.named_values import numbers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpStager, Config
from bytecheckpoint.errors import InvalidPlanError, StorageError
from bytecheckpoint.staging import staged_state as _staged

pytestmark = MARKS
# How long a process that imports torch may take on a busy machine.
PROCESS_LIMIT_S = 120.0


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def stages_and_forgets_nothing(state: dict[str, Any], stager: BcpStager) -> None:
    before = frozen(state)
    staged = stager.stage(state)
    assert isinstance(staged, dict)
    assert frozen(staged) == before
    spoil(state)
    assert frozen(state) != before
    assert frozen(staged) == before


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_kinds_of_values(num_threads: int) -> None:
    stages_and_forgets_nothing(broad(), BcpStager(config=Config(staging_threads=num_threads, on_staging_busy="raise")))


def test_dtensors(mesh: DeviceMesh) -> None:
    whole = numbers("whole", (6, 4))
    state = {
        "rows": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]).t(),
        "whole": distribute_tensor(whole.clone(), mesh, [Replicate()]),
        "parameter": torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)])),
        "empty": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)]),
        "conj": DTensor.from_local(torch.complex(torch.ones(3), torch.ones(3)).conj(), mesh, [Shard(0)]),
    }
    stages_and_forgets_nothing(state, BcpStager(config=RAISES))


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.UserDict, collections.ChainMap])
def test_the_top_need_not_be_a_dict(kind: Callable[[Any], Any]) -> None:
    state = kind({"b": torch.ones(3), "a": [1, torch.arange(2)]})
    wanted = frozen(dict(state))
    staged = BcpStager(config=RAISES).stage(state)
    spoil(state["b"])
    state["a"].clear()
    assert frozen(staged) == wanted


leaves = st.builds(
    lambda dtype, shape, seed, way: way(numbers(str(seed), tuple(shape), dtype)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128, torch.float8_e5m2]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
    st.sampled_from(
        [
            lambda t: t,
            lambda t: t.permute([*reversed(range(t.dim()))]),
            lambda t: t[..., ::2] if t.dim() else t,
            lambda t: t[1:] if t.dim() else t,
            lambda t: t.expand(2, *t.shape),
            lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
        ]
    ),
) | st.sampled_from([None, 1, "x", b"y"])
keys = st.text("abc.", max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        inner.map(lambda value: [value, value]),  # the same tensors twice
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(keys, trees, max_size=5), st.integers(1, 4))
def test_trees_of_tensors(state: dict[str, Any], num_threads: int) -> None:
    before = frozen(state)
    staged = BcpStager(config=Config(staging_threads=num_threads, on_staging_busy="raise")).stage(state)
    spoil(state)
    assert frozen(staged) == before


class Two(NamedTuple):
    a: Any
    b: Any


DOUBLED: list[Callable[[Any], Any]] = [
    lambda value: (value, value),
    lambda value: [value, value],
    lambda value: {"a": value, "b": value},
    lambda value: collections.OrderedDict(a=value, b=value),
    lambda value: Two(value, value),
]


@pytest.mark.parametrize("kinds", [*([kind] for kind in DOUBLED), DOUBLED])
def test_what_is_in_several_places_is_copied_once(kinds: list[Callable[[Any], Any]]) -> None:
    depth = 60  # a copy for each of the 2 ** 60 places would never end
    tree: Any = [tensor := torch.ones(3)]
    for level in range(depth):
        tree = kinds[level % len(kinds)](tree)
    staged: Any = BcpStager(config=RAISES).stage({"one": tree, "other": tree})
    tensor.zero_()
    copy, again = staged["one"], staged["other"]
    for level in reversed(range(depth)):
        assert copy is again
        assert type(copy) is type(kinds[level % len(kinds)](None))
        copy, again = copy.values() if isinstance(copy, dict) else copy
    assert copy is again
    assert torch.equal(copy[0], torch.ones(3))


def test_what_cannot_be_copied_is_named() -> None:
    for value in ((number for number in ()), threading.Lock()):
        with pytest.raises(InvalidPlanError, match=r"staging 'model\.list\.1': a (generator|.*lock) cannot be copied"):
            BcpStager(config=RAISES).stage({"model": {"list": [torch.ones(3), value]}})
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidPlanError, match=r"staging 'model\.freed': the tensor has no memory"):
        BcpStager(config=RAISES).stage({"model": {"freed": freed}})
    BcpStager(config=RAISES).stage({"a": torch.ones(3)})


@pytest.mark.parametrize("kind", [collections.deque, lambda items: collections.defaultdict(list, enumerate(items))])
def test_results_of_autograd_in_other_containers(kind: Callable[[Any], Any]) -> None:
    """DCP's own stager accepts them, and so does a save that is not asynchronous."""
    result = torch.ones(3, requires_grad=True) * 2
    staged: Any = BcpStager(config=RAISES).stage({"other": kind([result])})
    assert torch.equal(staged["other"][0], result)


def test_the_graph_of_a_tensor_is_not_kept() -> None:
    staged: Any = BcpStager(config=RAISES).stage({"result": torch.ones(3, requires_grad=True) * 2})
    assert staged["result"].is_leaf
    assert staged["result"].grad_fn is None


def test_copies_are_plain_dicts() -> None:
    stager = BcpStager(config=RAISES)
    state = broad()
    del state["csr"]  # torch has no deepcopy of it
    staged: Any = stager.stage(state)
    wanted = frozen(staged)
    shallow, deep = copy.copy(staged), copy.deepcopy(staged)
    assert (type(shallow), type(deep)) == (dict, dict)
    assert shallow["scalar"] is staged["scalar"]
    assert frozen(shallow) == frozen(deep) == wanted
    assert deep["tied"]["in"] is not staged["tied"]["in"]
    spoil(deep["scalar"])
    assert frozen(staged) == wanted
    spoil(deep["scalar"])
    staged.release()
    stager.stage({"other": torch.full((200_000,), 7.0)})
    assert frozen(deep) == wanted


def test_tied_tensors_are_staged_once() -> None:
    tied = torch.ones(1000)
    staged: Any = BcpStager(config=RAISES).stage({"in": tied, "out": tied, "again": [tied.view(1000)]})
    assert len({staged["in"].data_ptr(), staged["out"].data_ptr(), staged["again"][0].data_ptr()}) == 1
    small = BcpStager(config=Config(staging_bytes=4000, on_staging_busy="raise"))
    del staged
    small.stage({"in": tied, "out": tied})


def freeze_what_comes(pipe: Connection) -> None:
    """Runs in another process: receives states, and sends back what they hold."""
    while (state := pipe.recv()) is not None:
        pipe.send((type(state), frozen(state)))
        del state


@pytest.mark.timeout(2 * PROCESS_LIMIT_S)
def test_staged_states_travel_to_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=freeze_what_comes, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        for is_shareable in (True, False, True):
            everything = broad()
            del everything["quantized"]  # torch does not send its scales
            part = {"w": numbers("w", (3,)), "list": [numbers("v", (2,)), 1]}
            shared = {"one": part, "tensor": numbers("u", (5,)), "two": ([part, part["list"]], part)}
            for state in (everything, one(1, 300_000), {}, {"empty": torch.empty(0, 3)}, shared):
                wanted = frozen(state)
                staged = _staged.stage_state(state, RAISES, is_shareable=is_shareable).result(LIMIT_S)
                here.send(staged)
                assert here.poll(PROCESS_LIMIT_S)
                assert here.recv() == (dict, wanted)
                assert frozen(staged) == wanted
                del staged
        here.send(None)
        process.join(PROCESS_LIMIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


@pytest.mark.timeout(2 * PROCESS_LIMIT_S)
def test_memory_for_another_process_that_runs_out() -> None:
    """The sender gets an error, and can send the same state when there is room again."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=freeze_what_comes, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        staged = _staged.stage_state(one(1, 3_000_000), RAISES, is_shareable=True).result(LIMIT_S)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(StorageError, match=r"sendfile\(staging, 12\d{6} bytes\): File too large") as told:
                here.send(staged)
            assert told.value.errno == errno.EFBIG
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        here.send(staged)
        assert here.poll(PROCESS_LIMIT_S)
        assert here.recv() == (dict, frozen(staged))
    finally:
        process.kill()
        process.join()


def freeze_later(pipe: Connection) -> None:
    """Runs in another process: receives a state, and sends back what it holds when the sender asks."""
    state = pipe.recv()
    pipe.send("received")
    pipe.recv()
    pipe.send(frozen(state))


@pytest.mark.timeout(2 * PROCESS_LIMIT_S)
def test_what_was_sent_to_another_process_stays_there() -> None:
    """The next state is written to the memory of a state that is gone in this process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=freeze_later, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        staged = _staged.stage_state(one(1), RAISES, is_shareable=True).result(LIMIT_S)
        wanted = frozen(dict(staged))
        here.send(staged)
        assert here.poll(PROCESS_LIMIT_S)
        assert here.recv() == "received"
        del staged
        kept = BcpStager(config=RAISES).stage(one(2))
        here.send("look")
        assert here.poll(PROCESS_LIMIT_S)
        assert here.recv() == wanted
        del kept
    finally:
        process.kill()
        process.join()

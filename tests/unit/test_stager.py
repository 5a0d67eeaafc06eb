# SPDX-License-Identifier: Apache-2.0
"""``BcpStager``: what is staged is the state as it was, and stays that while anything may use it."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import planned_states
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.ranks import failures
from hypothesis import given, settings
from hypothesis import strategies as st
from interop.exact import assert_equal, settled
from interop.stock_states import numbers
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from bytecheckpoint import _C, BcpReader, BcpSavePlanner, BcpStager, BcpWriter, Config, registered
from bytecheckpoint.dcp import _staged
from bytecheckpoint.dcp._compat import PLAIN_DTYPES, quantization
from bytecheckpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidPlanError,
    SaveFailedError,
    StagingBusyError,
    StagingFullError,
)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings(
        "ignore:Sparse CSR",
        "ignore:ComplexHalf",
        "ignore:torch.quantize_per_tensor",
        "ignore:Detected an existing checkpoint",
    ),
]

# A test that leaks memory fails by this, instead of waiting.
RAISES = Config(on_staging_busy="raise")
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _no_state_is_left() -> Iterator[None]:
    """What a failed test still holds must not hold up the next one."""
    yield
    gc.collect()
    for _, lease in _staged._watched:
        lease.release()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass
class Schedule:
    """An object of a user's, with a tensor in it."""

    warmup: list[int]
    rates: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def frozen(value: Any) -> Any:
    """All that matters of a state, as plain values. Parameters are staged as tensors."""
    if isinstance(value, DTensor):
        about = value.placements, value.device_mesh.mesh.tolist(), value.shape, value.stride(), value.requires_grad
        return (DTensor, *about, frozen(value.to_local().detach()))
    if isinstance(value, TwoTensor):
        return TwoTensor, frozen(value.a), frozen(value.b)
    if isinstance(value, torch.Tensor):
        about = value.dtype, tuple(value.shape), value.layout, value.device.type, value.requires_grad
        return (*about, frozen_elements(value.detach()))
    if isinstance(value, dict):
        kind = dict if isinstance(value, _staged.StagedState) else type(value)
        return kind, [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [frozen(item) for item in value]
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Schedule):
        return Schedule, frozen(vars(value))
    return copy.copy(value)


def frozen_elements(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "meta":
        return None
    if tensor.layout == torch.sparse_coo:
        return tensor.is_coalesced(), frozen(tensor._indices()), frozen(tensor._values())
    if tensor.layout == torch.sparse_csr:
        return frozen(tensor.crow_indices()), frozen(tensor.col_indices()), frozen(tensor.values())
    if tensor.is_quantized:
        return quantization(tensor), frozen(tensor.int_repr())
    # Even a contiguous tensor may have any strides along dims of size 1.
    row = tensor.resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))
    return row.view(torch.uint8).numpy().tobytes()


def spoil(value: Any) -> None:
    """Changes all that can be changed in place."""
    if isinstance(value, torch.Tensor):
        for part in plain_parts(value):
            part.untyped_storage().copy_(flipped(part.untyped_storage()))
    elif isinstance(value, dict | collections.deque | list | set | bytearray):
        for item in list(value.values() if isinstance(value, dict) else value):
            spoil(item)
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, io.BytesIO):
        value.write(b"spoilt")
    elif isinstance(value, np.ndarray):
        value.fill(0)
    elif isinstance(value, Schedule):
        spoil(vars(value))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have the memory."""
    if isinstance(tensor, DTensor):
        return [tensor.to_local().detach()]
    if isinstance(tensor, TwoTensor):
        return [tensor.a, tensor.b]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [] if tensor.device.type == "meta" else [tensor.detach()]


def flipped(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_not().untyped_storage()


def broad() -> dict[str, Any]:
    whole = numbers("whole", (6, 8))
    tied = numbers("tied", (3, 5))
    shared = [1, [2]]
    return {
        "dtypes": {str(dtype): numbers(str(dtype), (2, 3), dtype) for dtype in sorted(PLAIN_DTYPES, key=str)},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": [torch.empty(0, 4), torch.empty(3, 0, dtype=torch.int8), torch.empty(0)],
        "views": {
            "transposed": whole.t(),
            "strided": whole[1::2, ::3],
            "overlapping": (whole[:4], whole[2:], whole.as_strided((3, 3), (1, 1))),
            "expanded": numbers("expanded", (1, 3)).expand(4, 3),
            "permuted": numbers("images", (2, 3, 2, 2)).contiguous(memory_format=torch.channels_last),
            "conj": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
            "neg": torch._neg_view(torch.arange(3.0)),
        },
        "tied": {"in": tied, "out": tied, "turned": tied.t()},
        "parameter": torch.nn.Parameter(numbers("parameter", (4,))),
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 3,
        "quantized": torch.quantize_per_tensor(torch.arange(6.0), 0.5, 3, torch.quint8),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.ones(2, device="meta"),
        "wrapper": TwoTensor(numbers("a", (2,)), numbers("b", (2,))),
        "ordered": collections.OrderedDict(b=torch.ones(2), a=[(torch.zeros(1), {"deep": torch.arange(3)})]),
        "pair": Pair(torch.ones(2), 3),
        "default": collections.defaultdict(list, {"t": torch.ones(3), "l": [1]}),
        "objects": [1, 2.5, True, None, "text \u00e4", b"\0x", 1 << 80, 1j, torch.float16, torch.Size([2])],
        "containers": {"set": {1, 2}, "bytearray": bytearray(b"abc"), "shared": [shared, shared], "": [], 7: "seven"},
        "file": io.BytesIO(b"some bytes"),
        "array": np.arange(4),
        "schedule": Schedule([1, 2], torch.arange(3.0)),
    }


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
    """DCP's own stager takes them, and so does a save that is not asynchronous."""
    result = torch.ones(3, requires_grad=True) * 2
    staged: Any = BcpStager(config=RAISES).stage({"other": kind([result])})
    assert torch.equal(staged["other"][0], result)


def test_the_graph_of_a_tensor_is_not_kept() -> None:
    staged: Any = BcpStager(config=RAISES).stage({"result": torch.ones(3, requires_grad=True) * 2})
    assert staged["result"].is_leaf
    assert staged["result"].grad_fn is None


# Saves


def save_async(
    how: str, state: dict[str, Any], path: Path, planner: Any = None, config: Config = RAISES
) -> Future[Any] | AsyncSaveResponse:
    arguments: dict[str, Any] = {"planner": planner, "no_dist": True}
    if how == "writer":
        return dcp.async_save(state, storage_writer=BcpWriter(path, config=config), **arguments)
    if how == "stager":
        stager = BcpStager(config=config)
        return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path), async_stager=stager, **arguments)
    with registered(config=config):
        return dcp.async_save(state, checkpoint_id=path, **arguments)


def start(how: str, state: dict[str, Any], path: Path, planner: Any = None, config: Config = RAISES) -> Future[Any]:
    future = save_async(how, state, path, planner, config)
    assert isinstance(future, Future)
    return future


HOWS = ("writer", "stager", "registered")


def assert_loads(path: Path, wanted: dict[str, Any]) -> None:
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        got = planned_states.blank(wanted)
        dcp.load(got, storage_reader=reader, no_dist=True)
        assert_equal(settled(got), settled(wanted))


def one(number: int, count: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((count,), float(number)), "step": number}


def all_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in all_tensors(item)]


@contextlib.contextmanager
def changing(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Another thread changes the tensors, over and over."""
    changed, stop = threading.Event(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            for tensor in tensors:
                spoil(tensor)
            changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert changed.wait(LIMIT_S)
        yield
    finally:
        stop.set()
        thread.join()


def large() -> dict[str, Any]:
    torch.manual_seed(1)  # some of it is random
    state = planned_states.more()
    state["large"] = [numbers("large", (700, 1500)), numbers("turned", (500, 900), torch.bfloat16).t()]
    return state


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner, BcpSavePlanner])
@pytest.mark.parametrize("how", HOWS)
def test_later_changes_are_not_saved(tmp_path: Path, how: str, planner: Callable[[], Any] | None) -> None:
    state = large()
    future = start(how, state, tmp_path, planner and planner())
    with changing(all_tensors(state)):
        state["optimizer"]["lrs"].append(0.3)
        state["objects"]["nested"].clear()
        state["objects"]["set"].add(3)
        future.result(LIMIT_S)
    assert_loads(tmp_path, large())


@pytest.mark.parametrize("how", HOWS)
def test_overlap_gives_two_futures(tmp_path: Path, how: str) -> None:
    state = one(1)
    response = save_async(how, state, tmp_path, config=dataclasses.replace(RAISES, overlap_staging=True))
    assert isinstance(response, AsyncSaveResponse)
    assert response.staging_completion.result(LIMIT_S) is None
    spoil(state)
    response.upload_completion.result(LIMIT_S)
    assert_loads(tmp_path, one(1))
    assert isinstance(save_async(how, one(2), tmp_path), Future), "the setting is of one save"


def test_overlap_of_a_stager_goes_before_its_config() -> None:
    overlapping = dataclasses.replace(RAISES, overlap_staging=True)
    assert isinstance(BcpStager(False, config=overlapping).stage(one(1)), dict)
    staged = BcpStager(True, config=RAISES).stage(one(1))
    assert isinstance(staged, Future)
    assert frozen(staged.result(LIMIT_S)) == frozen(one(1))


@pytest.mark.parametrize(
    "stager", [lambda: DefaultStager(StagingOptions(False, False, False, False)), BlockingAsyncStager]
)
def test_stagers_of_dcp_with_our_writer(tmp_path: Path, stager: Callable[[], Any]) -> None:
    state = one(1)
    writer = BcpWriter(tmp_path)
    future: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager(), no_dist=True)
    spoil(state)
    future.result(LIMIT_S)
    assert_loads(tmp_path, one(1))


# Memory for one state, or for two


class Gate:
    """Keeps a save in flight."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def planner(self) -> DefaultSavePlanner:
        gate = self

        class Gated(DefaultSavePlanner):
            def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
                gate.reached.set()
                assert gate.go.wait(LIMIT_S)
                return super().resolve_data(write_item)

        return Gated()


class Announces:
    """Tells when it is copied: staging has begun then."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        self.event.set()


@contextlib.contextmanager
def in_flight(how: str, path: Path, config: Config) -> Iterator[tuple[Gate, Future[Any]]]:
    gate = Gate()
    first = start(how, one(1), path, gate.planner(), config)
    try:
        assert gate.reached.wait(LIMIT_S)
        yield gate, first
    finally:
        gate.go.set()
        first.exception(LIMIT_S)


class Waiting(threading.Thread):
    """Begins a save that must wait, in a thread of its own."""

    def __init__(self, how: str, state: dict[str, Any], path: Path, config: Config, log: list[str]) -> None:
        super().__init__()
        self.begun, self.returned = threading.Event(), threading.Event()
        self.arguments = how, {**state, "announces": Announces(self.begun)}, path, None, config
        self.log = log
        self.start()
        assert self.begun.wait(LIMIT_S)

    def run(self) -> None:
        self.future = start(*self.arguments)
        self.log.append("returned")
        self.returned.set()


@pytest.mark.parametrize("how", HOWS)
def test_wait(tmp_path: Path, how: str) -> None:
    config = Config(on_staging_busy="wait")
    log: list[str] = []
    with in_flight(how, tmp_path / "1", config) as (gate, first):
        second = Waiting(how, one(2), tmp_path / "2", config, log)
        assert not second.returned.wait(0.1)
        log.append("let go")
        gate.go.set()
        first.result(LIMIT_S)
        second.join(LIMIT_S)
    assert log == ["let go", "returned"]
    second.future.result(LIMIT_S)
    assert_loads(tmp_path / "1", one(1))
    assert_loads(tmp_path / "2", {**one(2), "announces": None})


@pytest.mark.parametrize("how", HOWS)
def test_raise(tmp_path: Path, how: str) -> None:
    with in_flight(how, tmp_path / "1", RAISES) as (_, first):
        with pytest.raises(StagingBusyError, match=r'cannot be staged while the one before is saved.*"raise"'):
            save_async(how, one(2), tmp_path / "2")
        assert not first.done()
    first.result(LIMIT_S)
    assert_loads(tmp_path / "1", one(1))
    assert not (tmp_path / "2" / ".metadata").exists()
    start(how, one(2), tmp_path / "2").result(LIMIT_S)
    assert_loads(tmp_path / "2", one(2))


@pytest.mark.parametrize("how", HOWS)
def test_double_buffer(tmp_path: Path, how: str) -> None:
    config = Config(on_staging_busy="double_buffer")
    log: list[str] = []
    with (
        in_flight(how, tmp_path / "1", config) as (first_gate, first),
        in_flight(how, tmp_path / "2", config) as (_, second),
    ):
        third = Waiting(how, one(3), tmp_path / "3", config, log)
        assert not third.returned.wait(0.1)
        assert not first.done()
        assert not second.done()
        log.append("let go")
        first_gate.go.set()
        third.join(LIMIT_S)
        assert not second.done(), "the end of one is enough"
    assert log == ["let go", "returned"]
    third.future.result(LIMIT_S)
    assert_loads(tmp_path / "1", one(1))
    assert_loads(tmp_path / "2", one(1))
    assert_loads(tmp_path / "3", {**one(3), "announces": None})


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [DefaultSavePlanner, BcpSavePlanner])
def test_a_planner_that_is_kept_keeps_no_memory(tmp_path: Path, how: str, kind: Callable[[], Any]) -> None:
    """A planner knows the state dict of its last save."""
    planner = kind()
    try:
        for number in range(3):
            start(how, one(number), tmp_path, planner).result(LIMIT_S)
            assert_loads(tmp_path, one(number))
    finally:
        vars(planner).clear()


class FailingPlanner(DefaultSavePlanner):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self.hook == "set_up_planner":
            raise ZeroDivisionError(self.hook)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.hook == "finish_plan":
            raise ZeroDivisionError(self.hook)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if self.hook == "resolve_data":
            raise ZeroDivisionError(self.hook)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("hook", ["set_up_planner", "finish_plan", "resolve_data"])
@pytest.mark.parametrize("how", HOWS)
def test_a_failed_save_that_is_kept_keeps_no_memory(tmp_path: Path, how: str, hook: str) -> None:
    failed = start(how, one(1), tmp_path, FailingPlanner(hook))
    error = failed.exception(LIMIT_S)
    assert error is not None
    assert hook in str(error)
    start(how, one(2), tmp_path).result(LIMIT_S)
    assert_loads(tmp_path, one(2))
    assert failed.exception() is error


def test_a_state_that_nobody_has_keeps_no_memory() -> None:
    stager = BcpStager(config=RAISES)
    for number in range(3):
        staged: Any = stager.stage(one(number))
        assert frozen(staged) == frozen(one(number))
        del staged


def test_one_tensor_keeps_the_memory_of_its_state() -> None:
    stager = BcpStager(config=RAISES)
    staged: Any = stager.stage(one(1))
    tensor = staged["w"][3:]
    del staged
    with pytest.raises(StagingBusyError):
        stager.stage(one(2))
    assert torch.equal(tensor, one(1)["w"][3:])
    del tensor
    stager.stage(one(2))


def test_release() -> None:
    stager = BcpStager(config=RAISES)
    first: Any = stager.stage(one(1))
    first.release()
    first.release()
    second: Any = stager.stage(one(2))
    first.release()
    with pytest.raises(StagingBusyError):
        stager.stage(one(3))
    assert frozen(second) == frozen(one(2))


@pytest.mark.parametrize("how", HOWS)
def test_memory_is_used_again(tmp_path: Path, how: str) -> None:
    gc.collect()
    _C.close_arena()
    taken = []
    for number in range(5):
        start(how, one(number, 900_000), tmp_path).result(LIMIT_S)
        taken.append(_C.arena_bytes())
    assert taken[0] >= 3_600_000
    assert set(taken) == {taken[0]}


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_state_larger_than_allowed(is_taken: bool) -> None:
    small = BcpStager(config=Config(staging_bytes=4096))
    kept = small.stage(one(1, 1000)) if is_taken else None
    with pytest.raises(StagingFullError, match=r"takes 4100 bytes, and may take 4096 \(staging_bytes\)"):
        small.stage(one(2, 1025))
    assert kept is None or frozen(kept) == frozen(one(1, 1000))
    del kept
    for count in (1024, 0):
        staged = small.stage(one(3, count))
        assert frozen(staged) == frozen(one(3, count))
        del staged
    BcpStager(config=RAISES).stage(one(4, 1025))


def test_staging_bytes_are_ready_ahead_of_time(tmp_path: Path) -> None:
    gc.collect()
    _C.close_arena()
    assert _C.arena_bytes() == 0
    BcpStager(config=Config(staging_bytes=5 << 20))
    ready = _C.arena_bytes()
    assert ready >= 5 << 20
    for number in range(2):
        config = Config(staging_bytes=5 << 20, on_staging_busy="raise")
        start("writer", one(number, 1_000_000), tmp_path, config=config).result(LIMIT_S)
    assert _C.arena_bytes() == ready
    _C.close_arena()
    assert _C.arena_bytes() == 0


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_forked_child_is_refused(is_taken: bool) -> None:
    stager = BcpStager()
    staged: Any = stager.stage(one(1))
    if not is_taken:
        staged.release()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(10)
            stager.stage(one(2))
        except CheckpointError as error:
            code = 0 if "in a forked child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if is_taken:
        assert frozen(staged) == frozen(one(1))
    del staged
    assert frozen(stager.stage(one(3))) == frozen(one(3))


# Bytes that change while they wait


class Halves(DefaultSavePlanner):
    """Writes each large tensor as two chunks."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[half for item in plan.items for half in halves(item)])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        whole: torch.Tensor = self.state_dict[write_item.index.fqn]
        for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            whole = whole.narrow(dim, begin, size)
        return whole


def halves(item: WriteItem) -> list[WriteItem]:
    if item.tensor_data is None:
        return [item]
    size = item.tensor_data.size
    items = []
    for begin, end in ((0, size[0] // 2), (size[0] // 2, size[0])):
        offsets, sizes = torch.Size([begin, *[0] * (len(size) - 1)]), torch.Size([end - begin, *size[1:]])
        chunk = ChunkStorageMetadata(offsets, sizes)
        tensor_data = dataclasses.replace(item.tensor_data, chunk=chunk)
        items.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=tensor_data))
    return items


def waiting() -> dict[str, Any]:
    """Of some stretches of checked bytes, and of less than one."""
    return {"model": {"large": numbers("large", (1000, 900)), "small": numbers("small", (6, 4))}, "step": 1}


@pytest.mark.parametrize("planner", [DefaultSavePlanner, BcpSavePlanner, Halves])
@pytest.mark.parametrize(
    ("name", "place"), [("large", (0, 0)), ("large", (700, 5)), ("large", (999, 899)), ("small", (5, 3))]
)
def test_staged_bytes_that_change_are_found(
    tmp_path: Path, planner: Callable[[], Any], name: str, place: tuple[int, int]
) -> None:
    staged: Any = BcpStager(config=RAISES).stage(waiting())
    dcp.save(staged, storage_writer=BcpWriter(tmp_path), planner=planner(), no_dist=True)
    assert_loads(tmp_path, waiting())
    bits = staged["model"][name].view(torch.int32)
    bits[place] ^= 1
    found = failures(lambda: dcp.save(staged, storage_writer=BcpWriter(tmp_path), planner=planner(), no_dist=True))
    failed = found[0]
    assert isinstance(failed, SaveFailedError)
    assert isinstance(failed.reasons[0], CorruptCheckpointError)
    assert f"model.{name}" in str(failed.reasons[0])
    assert_loads(tmp_path, waiting())
    bits[place] ^= 1
    dcp.save(staged, storage_writer=BcpWriter(tmp_path), planner=planner(), no_dist=True)


def test_memory_that_was_let_go_may_change(tmp_path: Path) -> None:
    staged: Any = BcpStager(config=RAISES).stage(waiting())
    staged.release()
    staged["model"]["small"].zero_()
    dcp.save(staged, storage_writer=BcpWriter(tmp_path), no_dist=True)
    wanted = waiting()
    wanted["model"]["small"].zero_()
    assert_loads(tmp_path, wanted)


# Copies


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
    """In another process."""
    while (state := pipe.recv()) is not None:
        pipe.send((type(state), frozen(state)))
        del state


def test_staged_states_travel_to_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=freeze_what_comes, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        for is_shareable in (True, False, True):
            everything = broad()
            del everything["quantized"]  # whose scales torch does not send
            for state in (everything, one(1, 300_000), {}, {"empty": torch.empty(0, 3)}):
                wanted = frozen(state)
                staged = _staged.stage_state(state, RAISES, is_shareable=is_shareable).result(LIMIT_S)
                here.send(staged)
                assert here.poll(LIMIT_S)
                assert here.recv() == (dict, wanted)
                assert frozen(staged) == wanted
                del staged
        here.send(None)
        process.join(LIMIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()

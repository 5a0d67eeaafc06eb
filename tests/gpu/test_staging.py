# SPDX-License-Identifier: Apache-2.0
"""Stages CUDA tensors: every byte arrives, in the right order with streams, and while training goes on."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_loads
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import BcpStager, BcpWriter, Config, async_save_state_dict
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.compat.private_names import PLAIN_DTYPES
from bytecheckpoint.native import _C

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:ComplexHalf")]

LIMIT_S = 60.0
BUSY_CYCLES = 200_000_000  # keeps a stream busy for about a tenth of a second
MIB = 1 << 20


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which torch copies a device tensor to the host."""

    def host_copy(value: Any, memo: dict[int, Any]) -> Any:
        raise AssertionError(f"copied by torch: {type(value).__name__}")

    monkeypatch.setattr(_compat, "host_copy", host_copy)


def drawn(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """Returns random bytes on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


def bits(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of the elements in row-major order, as torch itself copies them."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def stage(state: dict[str, Any]) -> dict[str, Any]:
    staged = BcpStager(overlap=False, config=Config(on_staging_busy="raise")).stage(state)
    assert isinstance(staged, dict)
    return staged


def begin(state: dict[str, Any]) -> Future[Any]:
    staging = BcpStager(overlap=True, config=Config(on_staging_busy="raise")).stage(state)
    assert isinstance(staging, Future)
    return staging


def assert_staged(staged: dict[str, Any], wanted: dict[str, bytes], like: dict[str, torch.Tensor]) -> None:
    assert staged.keys() == wanted.keys()
    for key, got in staged.items():
        assert got.device.type == "cpu"
        assert (got.dtype, got.shape) == (like[key].dtype, like[key].shape), key
        assert bits(got) == wanted[key], key


def stages_exactly(state: dict[str, torch.Tensor]) -> None:
    wanted = {key: bits(tensor) for key, tensor in state.items()}
    assert_staged(stage(state), wanted, state)
    gc.collect()
    assert_staged(begin(state).result(LIMIT_S), wanted, state)
    gc.collect()


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("dtype", sorted(PLAIN_DTYPES, key=str), ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    ones = (drawn(2 * 33 * 7 * size) & 1).view(torch.bool) if dtype is torch.bool else None
    whole = (ones if ones is not None else drawn(2 * 33 * 7 * size).view(dtype)).view(2, 33, 7)
    state = {"whole": whole, "part": whole[1:, 3:30, 2:5], "turned": whole.transpose(0, 2), "stepped": whole[:, ::2]}
    stages_exactly(state)


def layouts() -> dict[str, torch.Tensor]:
    floats = drawn(4 * 64 * 65 * 66, seed=1).view(torch.float32).view(64, 65, 66)
    halves = drawn(2 * MIB + 2, seed=2).view(torch.bfloat16)
    return {
        "scalar": floats[0, 0, 0],
        "empty": floats[:0],
        "empty inside": floats[:, :0, :2],
        "one": floats[3:4, 5:6, 7:8],
        "whole": floats,
        "turned": floats.permute(2, 0, 1),
        "stepped": floats[::3, 1::2, ::5],
        "expanded": floats[:, :1, 2:3].expand(64, 65, 3),
        "overlapping": floats.as_strided((100, 100), (1, 2), 17),
        "channels last": floats[:60].reshape(15, 4, 65, 66).to(memory_format=torch.channels_last),
        "of odd address": halves[1:],
        "of odd length": halves[3 : MIB - 2],
        "turned halves": halves[: 1023 * 1024].view(1023, 1024).t(),
        "bytes": drawn(MIB + 77, seed=3)[5:],
    }


@pytest.mark.usefixtures("direct")
def test_every_layout() -> None:
    stages_exactly(layouts())


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("seed", range(8))
def test_drawn_layouts(seed: int) -> None:
    draw = random.Random(seed)
    state = {}
    for number in range(draw.choice([1, 30, 300])):
        dtype = draw.choice([torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
        sizes = [draw.choice([0, 1, 2, 3, 8, 17, 64, 130]) for _ in range(draw.randrange(4))]
        tensor = drawn(1 + dtype.itemsize * max(1, torch.Size(sizes).numel()), seed=1000 * seed + number)
        tensor = tensor[: tensor.numel() - 1].view(dtype)[: torch.Size(sizes).numel()].view(sizes)
        dims = list(range(tensor.dim()))
        draw.shuffle(dims)
        tensor = tensor.permute(dims)
        for dim, size in enumerate(tensor.shape):
            if size and draw.random() < 0.3:
                begin_at = draw.randrange(size)
                tensor = tensor.narrow(dim, begin_at, draw.randint(1, size - begin_at))
        state[f"t{number}"] = tensor
    stages_exactly(state)


@pytest.mark.usefixtures("direct")
def test_large_and_small() -> None:
    """Small tensors fill the scratch memory several times. The large ones between them do not go through it."""
    state: dict[str, torch.Tensor] = {}
    for number in range(6000):
        state[f"small{number}"] = drawn(4 * (1 + number % 8000), seed=number).view(torch.float32)
    for number in range(4):
        state[f"large{number}"] = drawn(48 * MIB + 8 * number, seed=number).view(torch.float64)
        state[f"turned{number}"] = state[f"large{number}"][: 6 * MIB].view(2048, 3072).t()
    order = list(state.items())
    random.Random(0).shuffle(order)
    stages_exactly(dict(order))


def test_what_is_no_plain_memory_is_staged_through_torch() -> None:
    numbers = drawn(8 * 1000).view(torch.int32).remainder(1000).to(torch.float32).view(torch.complex64)
    state = {
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "sparse": torch.eye(5, device="cuda").to_sparse(),
    }
    staged = stage(state)
    assert bits(staged["conjugate"]) == bits(state["conjugate"])
    assert bits(staged["negative"]) == bits(state["negative"])
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(5))


@pytest.mark.usefixtures("direct")
def test_tied_tensors_and_parameters() -> None:
    weight = torch.nn.Parameter(drawn(4000).view(torch.int32).to(torch.float32))
    staged = stage({"a": weight, "b": weight, "part": weight[:10].detach(), "host": torch.arange(5)})
    assert staged["a"].requires_grad
    assert staged["a"].data_ptr() == staged["b"].data_ptr() != staged["part"].data_ptr()
    assert bits(staged["a"]) == bits(weight)
    assert bits(staged["part"]) == bits(weight[:10])
    assert staged["host"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("direct")
def test_dtensors(mesh: DeviceMesh) -> None:
    for placement in (Shard(0), Shard(1), Replicate()):
        full = drawn(4 * 30 * 20).view(torch.int32).view(30, 20)
        value = distribute_tensor(full, mesh, [placement])
        staged = stage({"t": value})["t"]
        assert isinstance(staged, DTensor)
        assert (staged.placements, staged.shape) == (value.placements, value.shape)
        assert staged.to_local().device.type == "cpu"
        assert bits(staged.to_local()) == bits(full)
        del staged
        gc.collect()


def test_staged_memory_is_pinned_until_it_is_given_back() -> None:
    bytecheckpoint.shutdown()
    for size in (1000, 40 * MIB, 100 * MIB, 1000):  # it grows, and is pinned again
        staged = stage({"t": drawn(size), "host": torch.zeros(10)})
        assert staged["t"].is_pinned()
        assert staged["host"].is_pinned()
        del staged
        gc.collect()
    bytecheckpoint.shutdown()
    assert _C.arena_bytes() == 0
    stages_exactly({"t": drawn(10 * MIB)})


# --- order: staging copies what the caller's stream had written before, and nothing that it writes later


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("is_other", [False, True], ids=["default stream", "another stream"])
def test_it_waits_for_what_the_stream_is_still_to_write(is_other: bool) -> None:
    state = {f"t{number}": torch.zeros(1 + 7000 * number, device="cuda") for number in range(60)}
    state["large"] = torch.zeros(20 * MIB, device="cuda")
    stream = torch.cuda.Stream() if is_other else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    for round_ in range(1, 6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES)
            torch._foreach_add_(list(state.values()), 1.0)
            staged = begin(state).result(LIMIT_S) if round_ % 2 else stage(state)
        for key, tensor in staged.items():
            assert torch.equal(tensor, torch.full_like(tensor, float(round_))), key
        del staged, tensor
        gc.collect()


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("is_other", [False, True], ids=["default stream", "another stream"])
@pytest.mark.parametrize("overlap", [False, True])
def test_writing_right_behind_staging_is_no_race(overlap: bool, is_other: bool) -> None:
    state = {f"t{number}": torch.zeros(1 + 5000 * number, device="cuda") for number in range(200)}
    state["large"] = torch.zeros(30 * MIB, device="cuda")
    state["turned"] = torch.zeros(2000, 3000, device="cuda").t()
    stream = torch.cuda.Stream() if is_other else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for round_ in range(20):
            staged = begin(state).result(LIMIT_S) if overlap else stage(state)
            torch._foreach_add_(list(state.values()), 1.0)
            torch.cuda.synchronize()
            for key, tensor in staged.items():
                assert torch.equal(tensor, torch.full_like(tensor, float(round_))), key
            del staged, tensor
            gc.collect()


@pytest.mark.usefixtures("direct")
def test_host_tensors_may_change_at_once_and_device_tensors_be_forgotten() -> None:
    state = {"device": drawn(200 * MIB), "host": torch.ones(1000)}
    wanted = bits(state["device"])
    staging = begin(state)
    state["host"].zero_()
    del state["device"]
    again = [torch.zeros(200 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]  # would get its memory
    staged = staging.result(LIMIT_S)
    assert bits(staged["device"]) == wanted
    assert torch.equal(staged["host"], torch.ones(1000))
    assert len(again) == 2


# --- the device has little free memory


@pytest.mark.usefixtures("direct")
def test_without_scratch_it_is_slower_and_as_exact() -> None:
    state = {**layouts(), **{f"small{number}": drawn(100 + number, seed=number) for number in range(50)}}
    wanted = {key: bits(tensor) for key, tensor in state.items()}
    stages_exactly(state)  # now CUDA has allocated what it needs at the first use
    bytecheckpoint.shutdown()
    torch.cuda.synchronize()
    filling = []
    size = torch.cuda.mem_get_info()[0]
    while size >= 2 * MIB:
        try:
            filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        assert_staged(stage(state), wanted, state)
    finally:
        filling.clear()
        torch.cuda.empty_cache()
        bytecheckpoint.shutdown()


# --- whole saves


def state_of_training() -> dict[str, Any]:
    weights = {f"w{number}": drawn(4 * 3000, seed=number).view(torch.int32) for number in range(100)}
    return {"model": {**weights, "large": drawn(16 * MIB), "turned": weights["w1"].view(50, 60).t()}, "step": 7}


def spoil(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        tensor.zero_()


Begin = Callable[[dict[str, Any], Path], Any]
HOW: dict[str, Begin] = {
    "writer": lambda state, path: dcp.async_save(
        state, storage_writer=BcpWriter(path, config=Config(overlap_staging=True)), no_dist=True
    ),
    "stock writer": lambda state, path: dcp.async_save(
        state, checkpoint_id=path, async_stager=BcpStager(overlap=True), no_dist=True
    ),
}


@pytest.mark.parametrize("how", HOW)
def test_async_save_with_overlap(tmp_path: Path, how: str) -> None:
    for round_ in range(3):
        state, wanted = state_of_training(), state_of_training()
        response = HOW[how](state, tmp_path / str(round_))
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result(LIMIT_S)
        spoil(state)
        response.upload_completion.result(LIMIT_S)
        assert_loads(tmp_path / str(round_), wanted)


def test_async_save_without_overlap(tmp_path: Path) -> None:
    state, wanted = state_of_training(), state_of_training()
    saving = dcp.async_save(state, storage_writer=BcpWriter(tmp_path), no_dist=True)
    spoil(state)
    saving.result(LIMIT_S)
    assert_loads(tmp_path, wanted)


def test_async_save_state_dict(tmp_path: Path) -> None:
    state, wanted = state_of_training(), state_of_training()
    handle = async_save_state_dict(tmp_path, state, no_dist=True)
    handle.staged.result(LIMIT_S)
    spoil(state)
    handle.committed.result(LIMIT_S)
    assert_loads(tmp_path, wanted)


def test_save(tmp_path: Path) -> None:
    state = state_of_training()
    dcp.save(state, storage_writer=BcpWriter(tmp_path), no_dist=True)
    assert_loads(tmp_path, state)


def test_memory_that_changes_before_it_is_written_is_found(tmp_path: Path) -> None:
    staged = stage({"t": drawn(3 * MIB)})
    staged["t"][2 * MIB] ^= 1
    with pytest.raises(CheckpointException, match="has changed since it was staged"):
        dcp.save(staged, storage_writer=BcpWriter(tmp_path), no_dist=True)

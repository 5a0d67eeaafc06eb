# SPDX-License-Identifier: Apache-2.0
"""Synchronous saves of CUDA tensors and loads into them: bytes, and their order with what a stream has still to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, Config, load_state_dict, save_state_dict
from bytecheckpoint.compat.private_names import PLAIN_DTYPES
from bytecheckpoint.errors import CorruptCheckpointError

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:ComplexHalf")]

BUSY_CYCLES = 200_000_000  # keeps a stream busy for about a tenth of a second
MIB = 1 << 20
LIMIT_S = 60.0

Call = Callable[[dict[str, Any], Path], object]
SAVES: dict[str, Call] = {
    "dcp.save": lambda state, path: dcp.save(state, storage_writer=BcpWriter(path), no_dist=True),
    "save_state_dict": lambda state, path: save_state_dict(path, state, no_dist=True),
}
LOADS: dict[str, Call] = {
    "dcp.load": lambda state, path: dcp.load(state, storage_reader=BcpReader(path), no_dist=True),
    "load_state_dict": lambda state, path: load_state_dict(path, state, no_dist=True),
    "stock": lambda state, path: dcp.load(state, checkpoint_id=path, no_dist=True),
}


def drawn(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """Returns random bytes on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same layout on the same device, with other bytes and memory of its own."""
    memory = torch.full((33 * 14 * tensor.itemsize,), 0xA5, dtype=torch.uint8, device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.cpu() for key, tensor in state.items()}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_every_dtype_and_layout_comes_back(tmp_path: Path, save: str, load: str) -> None:
    state: dict[str, torch.Tensor] = {}
    for dtype in sorted(PLAIN_DTYPES, key=str):
        data = drawn(33 * 14 * dtype.itemsize, seed=len(state))
        whole = ((data & 1).view(torch.bool) if dtype is torch.bool else data.view(dtype)).view(33, 14)
        state[f"{dtype} whole"] = whole
        state[f"{dtype} turned"] = whole.t()
        state[f"{dtype} stepped"] = whole[1::2, ::3]
        state[f"{dtype} scalar"] = whole[3, 5]
    SAVES[save](state, tmp_path)
    wanted = on_host(state)
    got = {key: blank(tensor) for key, tensor in state.items()}
    LOADS[load](got, tmp_path)
    assert_equal(on_host(got), wanted)
    host = {key: blank(tensor) for key, tensor in wanted.items()}  # a checkpoint has no device
    LOADS[load](host, tmp_path)
    assert_equal(host, wanted)


def test_into_other_dtypes_and_memory(tmp_path: Path) -> None:
    values = torch.arange(3 * MIB, dtype=torch.float32).view(3, -1).cuda()
    save_state_dict(tmp_path, {"t": values, "u": values[:, :10].clone()}, no_dist=True)
    into = {"t": torch.zeros(values.shape, dtype=torch.float64, device="cuda"), "u": torch.zeros(10, 3).cuda().t()}
    load_state_dict(tmp_path, into, no_dist=True)
    assert torch.equal(into["t"], values.double())
    assert torch.equal(into["u"], values[:, :10])


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Copies to a device run in any order, so these are filled one after the other: the last one counts."""
    values = {key: drawn(4 * 1200, seed=seed).view(torch.int32).view(30, 40) for seed, key in enumerate("abcd")}
    save_state_dict(tmp_path, values, no_dist=True)
    for load in LOADS.values():
        shared = torch.zeros(30, 40, dtype=torch.int32, device="cuda")
        interleaved = torch.zeros(30, 80, dtype=torch.int32, device="cuda")
        load({"a": shared, "b": shared, "c": interleaved[:, :40], "d": interleaved[:, 40:]}, tmp_path)
        assert torch.equal(shared, values["b"])
        assert torch.equal(interleaved, torch.cat([values["c"], values["d"]], dim=1))


@pytest.mark.parametrize("verify", [True, False])
def test_damage_is_found_before_a_device_gets_it(tmp_path: Path, verify: bool) -> None:
    save_state_dict(tmp_path, {"t": drawn(3 * MIB)}, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[2 * MIB] ^= 1
    file.write_bytes(content)
    into = {"t": torch.full((3 * MIB,), 7, dtype=torch.uint8, device="cuda")}
    if not verify:
        load_state_dict(tmp_path, into, no_dist=True, config=Config(verify=False))
        assert int((into["t"] != drawn(3 * MIB)).sum()) == 1
        return
    with pytest.raises(CorruptCheckpointError, match="CRC"):
        load_state_dict(tmp_path, into, no_dist=True)
    assert int(into["t"][2 * MIB]) == 7


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("is_other", [False, True], ids=["default stream", "another stream"])
def test_a_save_waits_for_what_the_stream_is_still_to_write(tmp_path: Path, save: str, is_other: bool) -> None:
    state = {f"t{number}": torch.zeros(1 + 70000 * number, device="cuda") for number in range(20)}
    stream = torch.cuda.Stream() if is_other else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        torch._foreach_add_(list(state.values()), 1.0)
        SAVES[save](state, tmp_path)
    got = {key: torch.zeros(tensor.shape) for key, tensor in state.items()}
    load_state_dict(tmp_path, got, no_dist=True)
    for key, tensor in got.items():
        assert torch.equal(tensor, torch.ones_like(tensor)), key


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("is_other", [False, True], ids=["default stream", "another stream"])
def test_a_load_stands_between_earlier_and_later_work_of_the_stream(tmp_path: Path, load: str, is_other: bool) -> None:
    state = {f"t{number}": drawn(4 + 28000 * number, seed=number) for number in range(20)}
    save_state_dict(tmp_path, state, no_dist=True)
    wanted = on_host(state)
    stream = torch.cuda.Stream() if is_other else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        torch._foreach_zero_(list(state.values()))
        LOADS[load](state, tmp_path)
        copies = {key: tensor.clone() for key, tensor in state.items()}
    torch.cuda.synchronize()
    assert_equal(on_host(copies), wanted)
    assert_equal(on_host(state), wanted)


def test_dtensors_come_back(tmp_path: Path, mesh: DeviceMesh) -> None:
    full = drawn(4 * 30 * 20).view(torch.int32).view(30, 20)
    state = {str(p): distribute_tensor(full, mesh, [p]) for p in (Shard(0), Shard(1), Replicate())}
    dcp.save(state, storage_writer=BcpWriter(tmp_path))
    for value in state.values():
        value.to_local().zero_()
    dcp.load(state, storage_reader=BcpReader(tmp_path))
    for key, value in state.items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.to_local(), full), key


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return x


class Training:
    """FSDP2 on one device, with fused AdamW and dropout, which draws from the device's generator."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net().to("cuda")
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.model(torch.rand(16, 64, device="cuda")).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        rng = {"rng": bytecheckpoint.get_rng_state()}
        return {"model": self.model, "optimizer": self.optimizer, "extra_state": rng}


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "background save"])
def test_training_on_nccl_continues_exactly(tmp_path: Path, mesh: DeviceMesh, is_async: bool) -> None:
    training = Training(mesh, seed=1)
    training.steps(3)
    handle = bytecheckpoint.save(tmp_path, training.state(), "fsdp2", fast_saving=is_async)
    handle.staged.result(LIMIT_S)
    wanted = training.steps(4)
    handle.committed.result(LIMIT_S)
    again = Training(mesh, seed=2)
    loaded = again.state()
    bytecheckpoint.load(tmp_path, loaded, "fsdp2")
    bytecheckpoint.set_rng_state(loaded["extra_state"]["rng"])
    assert again.steps(4) == wanted

# SPDX-License-Identifier: Apache-2.0
"""Ranks publish in one sharding, and other ranks take it over in another, bit for bit; they agree on each version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import Publisher, Subscriber
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    ConfigError,
    OutOfStepError,
    StagingFullError,
    UnsupportedError,
)
from bytecheckpoint.publishing import deltas, kept_copy
from bytecheckpoint.tensors.chunks import LocalChunks

VERSIONS = range(1, 8)
SHAPES = {
    "rows": (640, 5),
    "uneven": (50, 3),
    "few": (2, 30),  # fewer rows than ranks
    "columns": (6, 160),
    "flipped": (96, 7),
    "whole": (30, 40),
    "scalar": (),
    "chunks": (80, 6),
    "empty": (0, 4),
}
TRAINED: dict[str, Placement] = {
    "rows": Shard(0),
    "uneven": Shard(0),
    "few": Shard(0),
    "columns": Shard(1),
    "flipped": Shard(0),
    "whole": Replicate(),
    "scalar": Replicate(),
    "empty": Shard(0),
}
SERVED: dict[str, Placement] = {
    "rows": Shard(1),
    "uneven": Replicate(),
    "few": Shard(1),
    "columns": Shard(0),
    "flipped": Shard(1),
    "whole": Shard(0),
    "chunks": Shard(1),
}


def full(name: str, version: int) -> torch.Tensor:
    """Returns a tensor of a version, as every rank can compute it: elements change now and then."""
    numel = torch.Size(SHAPES[name]).numel()
    value = torch.arange(numel, dtype=torch.float32) / 7
    for changed in range(1, version + 1):
        value[(changed * 37) % 11 :: 53] += changed
    return value.to(torch.bfloat16).view(SHAPES[name])


def trained(version: int, mesh: DeviceMesh) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: distribute_tensor(full(name, version), mesh, [placement]) for name, placement in TRAINED.items()
    }
    rank, size = mesh.get_local_rank(), mesh.size()
    value = full("chunks", version)
    rows = [*range(rank, 8, size)]  # every so many ten rows
    parts = [value[10 * row : 10 * row + 10].clone() for row in rows]
    state["chunks"] = LocalChunks(SHAPES["chunks"], [(10 * row, 0) for row in rows], parts, torch.bfloat16)
    state["plain"] = full("whole", version) * 2
    state[f"of_{rank}"] = full("whole", version) * rank  # as a stage of a pipeline has it
    state["step"] = version
    return state


def change_to(state: dict[str, Any], version: int, mesh: DeviceMesh) -> None:
    """Changes the tensors in place, as an optimizer does."""
    for name, value in trained(version, mesh).items():
        if isinstance(value, DTensor):
            state[name].to_local().copy_(value.to_local())
        elif isinstance(value, LocalChunks):
            for mine, other in zip(state[name].tensors, value.tensors, strict=True):
                mine.copy_(other)
        elif isinstance(value, torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value


def blank(mesh: DeviceMesh, num_trained: int) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros(SHAPES[name], dtype=torch.bfloat16), mesh, [placement])
        for name, placement in SERVED.items()
    }
    state["scalar"] = torch.zeros((), dtype=torch.bfloat16)
    for name in ("plain", *(f"of_{rank}" for rank in range(num_trained))):
        state[name] = torch.zeros(40, 30, dtype=torch.bfloat16).t()
    state["step"] = 0
    return state


def check(state: dict[str, Any], version: int) -> None:
    for name, value in state.items():
        if isinstance(value, DTensor):
            wanted = distribute_tensor(full(name, version), value.device_mesh, value.placements).to_local()
            assert torch.equal(value.to_local(), wanted), name
    assert torch.equal(state["scalar"], full("scalar", version))
    assert torch.equal(state["plain"], full("whole", version) * 2)
    for name, value in state.items():
        if name.startswith("of_"):
            assert torch.equal(value, full("whole", version) * int(name[3:])), name
    assert state["step"] == version


def publish_and_follow(place: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    publisher, each, some = Publisher(place, base_every=4), Subscriber(place), Subscriber(place)
    state = trained(0, mesh)
    of_each, of_some = blank(mesh, mesh.size()), blank(mesh, mesh.size())
    kinds = []
    for version in VERSIONS:
        change_to(state, version, mesh)
        report = publisher.publish(state, version)
        kinds.append(report.kind)
        assert each.update(of_each) == version
        check(of_each, version)
        if version in (2, 6):
            assert some.update(of_some) == version
            check(of_some, version)
    each.close()
    return kinds


def follow(place: Path, num_trained: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = blank(mesh, num_trained)
    subscriber = Subscriber(place)
    assert subscriber.update(state) == VERSIONS[-1]
    check(state, VERSIONS[-1])
    assert subscriber.update(state) is None


@pytest.mark.parametrize(("trainers", "servers"), [(4, 2), (2, 3), (1, 4), (3, 1)])
def test_other_numbers_of_ranks_and_layouts(tmp_path: Path, trainers: int, servers: int) -> None:
    kinds = run_ranks(trainers, publish_and_follow, tmp_path)
    assert kinds == [["base", "delta", "delta", "delta", "delta and base", "delta", "delta"]] * trainers
    run_ranks(servers, follow, tmp_path, trainers)


def in_halves(place: Path) -> None:
    """Two ranks train, and two others serve."""
    is_train = dist.get_rank() < 2
    group = bytecheckpoint.new_group([0, 1] if is_train else [2, 3])
    if is_train:
        publisher = Publisher(place, process_group=group)
        state: dict[str, Any] = {f"of_{dist.get_rank()}": full("rows", 0), "step": 0}
        for version in VERSIONS:
            state[f"of_{dist.get_rank()}"].copy_(full("rows", version))
            state["step"] = version
            publisher.publish(state, version)
            dist.barrier()
            dist.barrier()
        return
    subscriber = Subscriber(place, process_group=group)
    got: dict[str, Any] = {name: torch.zeros(SHAPES["rows"], dtype=torch.bfloat16) for name in ("of_0", "of_1")}
    got["step"] = 0
    for version in VERSIONS:
        dist.barrier()
        if version % 3 != 2:
            assert subscriber.update(got) == version
            assert torch.equal(got["of_0"], full("rows", version))
            assert torch.equal(got["of_1"], full("rows", version))
        dist.barrier()


def test_some_ranks_train_and_others_serve(tmp_path: Path) -> None:
    run_ranks(4, in_halves, tmp_path)


def with_a_new_rank(place: Path) -> tuple[int, int]:
    rank = dist.get_rank()
    publisher = Publisher(place)
    state = {"w": full("rows", 1), "step": 1}
    publisher.publish(state, 1)
    subscriber, got = Subscriber(place), {"w": torch.zeros_like(state["w"]), "step": 0}
    assert subscriber.update(got) == 1
    state["w"].copy_(full("rows", 2))
    publisher.publish(state, 2)
    if rank == 1:  # the others stand at version 1
        subscriber, got = Subscriber(place), {"w": torch.zeros_like(state["w"]), "step": 0}
    assert subscriber.update(got) == 2
    assert torch.equal(got["w"], full("rows", 2))
    assert (subscriber.version, got["step"]) == (2, 1)
    return subscriber.version or 0, int(got["step"])


def test_a_rank_that_is_new_brings_all_to_a_base(tmp_path: Path) -> None:
    assert run_ranks(3, with_a_new_rank, tmp_path) == [(2, 1)] * 3


def refused_on_all(place: Path) -> list[str]:
    rank = dist.get_rank()
    first, second = Publisher(place), Publisher(place)
    state: dict[str, Any] = {f"w_{rank}": torch.arange(1000.0)}
    refusals: list[CheckpointError] = []

    def refuse(error: type[CheckpointError], publisher: Publisher, odd: dict[str, Any], version: int) -> None:
        with pytest.raises(error) as caught:
            publisher.publish(odd, version)
        refusals.append(caught.value)

    refuse(UnsupportedError, first, {"w": torch.zeros(2).to_sparse()} if rank == 1 else state, 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    refuse(UnsupportedError, first, {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, 1)
    refuse(ConfigError, first, state, 1 + rank)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(kept_copy._core, "available_memory_bytes", lambda: 0)
        refuse(StagingFullError, first, state, 1)
    first.publish(state, 1)
    second.publish(state, 2)
    refuse(CheckpointBusyError, first, state, 3)
    subscriber = Subscriber(place)
    with pytest.raises(UnsupportedError):
        subscriber.update({"w": torch.zeros(2).to_sparse()} if rank == 1 else {**state})
    assert subscriber.update({**state}) == 2
    state[f"w_{rank}"][5] = -1
    assert second.publish(state, 3).kind == "delta"
    if rank == 1:
        state["more"] = 1
    report = second.publish(state, 4)
    assert report.kind == "base", "one rank has another key"
    return [type(error).__name__ for error in refusals]


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    names = ["UnsupportedError", "UnsupportedError", "ConfigError", "StagingFullError", "CheckpointBusyError"]
    assert run_ranks(2, refused_on_all, tmp_path) == [names] * 2


def interrupted_on_one(place: Path) -> list[str]:
    """A rank is interrupted when a version is committed: its copy is that of the version before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    publisher, subscriber = Publisher(place), Subscriber(place)
    state = {f"w_{rank}": torch.zeros(1000)}
    got = {f"w_{other}": torch.ones(1000) for other in range(size)}
    kinds = [publisher.publish(state, 1).kind]
    saved = publisher._saved

    def interrupted(*call: Any) -> Any:
        saved(*call)
        raise KeyboardInterrupt

    state[f"w_{rank}"][1] = 1
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(publisher, "_saved", interrupted)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(state, 2)
    with pytest.raises(OutOfStepError):
        publisher.publish(state, 2)  # on the other ranks the call in which one was interrupted
    assert subscriber.update(got) == 2
    state[f"w_{rank}"][1] = 0  # as it was in version 1
    state[f"w_{rank}"][2] = 5
    kinds.append(publisher.publish(state, 3).kind)
    assert subscriber.update(got) == 3
    assert all(torch.equal(value, state[f"w_{rank}"]) for value in got.values())
    return kinds


def test_a_rank_whose_copy_is_older_brings_a_base(tmp_path: Path) -> None:
    assert run_ranks(2, interrupted_on_one, tmp_path) == [["base", "base"]] * 2


def out_of_memory(*_: object) -> None:
    raise MemoryError("no room here")


def fails_late_on_one(place: Path) -> None:
    """What a rank does by itself behind a commit, or with deltas that were read, may fail there, too."""
    publisher, subscriber = Publisher(place), Subscriber(place)
    state, got = {"w": torch.zeros(1000)}, {"w": torch.ones(1000)}
    publisher.publish(state, 1)
    assert subscriber.update(got) == 1
    state["w"][1] = 1
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(kept_copy.KeptCopy, "apply", out_of_memory)
            patched.setattr(deltas.ReadDelta, "apply", out_of_memory)
        with pytest.raises(MemoryError, match="no room here"):
            publisher.publish(state, 2)
        with pytest.raises(MemoryError, match="no room here"):
            subscriber.update(got)
    assert subscriber.version is None
    state["w"][2] = 2
    assert publisher.publish(state, 3).kind == "base"
    assert subscriber.update(got) == 3
    assert torch.equal(got["w"], state["w"])


def test_what_fails_late_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    run_ranks(2, fails_late_on_one, tmp_path)


def written_through_a_dtensor(place: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    publisher, subscriber = Publisher(place), Subscriber(place)
    layer, other = torch.nn.Linear(9, 7), torch.nn.Linear(9, 7)
    fully_shard(layer, mesh=mesh)
    fully_shard(other, mesh=mesh)
    for version in (1, 2, 3):
        with torch.no_grad():
            layer.weight.to_local()[:1] = version  # type: ignore[operator]
        publisher.publish(layer.state_dict(), version)
        assert subscriber.update(other.state_dict()) == version
        assert torch.equal(layer.weight.full_tensor(), other.weight.full_tensor())  # type: ignore[operator]
        other(torch.ones(1, 9))
        if version == 2:
            assert subscriber._taken is not None
            assert subscriber._taken.builds_on == 1, "each state_dict() has the same tensors, and a forward writes none"
            other.state_dict()["weight"].mul_(3)


def test_writes_through_a_dtensor_are_seen(tmp_path: Path) -> None:
    run_ranks(2, written_through_a_dtensor, tmp_path)


def a_base_fails_on_one(place: Path) -> list[str]:
    publisher = Publisher(place, base_every=2)
    state = {"w": torch.zeros(1000)}
    kinds = []
    saved = publisher._saved

    def fails(kind: str, *call: Any) -> Any:
        report = saved(kind, *call)
        if kind == "base" and dist.get_rank() == 1:
            raise CheckpointError("behind the commit")
        return report

    for version in range(1, 7):
        state["w"][version] = 1
        with pytest.MonkeyPatch.context() as patched:
            if version == 3:
                patched.setattr(publisher, "_saved", fails)
            kinds.append(publisher.publish(state, version).kind)
    return kinds


def test_all_ranks_publish_the_same_bases(tmp_path: Path) -> None:
    first, other = run_ranks(2, a_base_fails_on_one, tmp_path)
    assert first == ["base", "delta", "delta and base", "delta", "delta and base", "delta"]
    assert other[:2] + other[3:] == first[:2] + first[3:]

# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core's ``dist_checkpointing`` may be asked for, tried through our strategies on two gloo ranks.

    cd tests && PYTHONPATH=.. python -m interop.megatron_strategies.cases FOLDER [CASE ...]

Runs in an environment that has megatron-core and our package, but not pytest. Each case is a function of this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from bytecheckpoint import Config
from bytecheckpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidPlanError,
    KeyMismatchError,
    ShapeMismatchError,
    UnsafeObjectError,
    UnsupportedError,
)
from bytecheckpoint.integrations.megatron import BcpLoadStrategy, BcpSaveStrategy, register, unregister
from interop.foreign_golden import megatron as golden
from interop.megatron_strategies.ranks import run, shards

__all__: list[str] = []

of_ranks = ShardedTensor.from_rank_offsets


class Odd:
    """An object of a type that ``weights_only`` does not know."""


def folder(root: str, name: str) -> str:
    path = Path(root, name)
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(path)


def save(state: dict[str, Any], path: str, **options: Any) -> None:
    dist_checkpointing.save(state, path, BcpSaveStrategy(**options))


def load(state: dict[str, Any], path: str, strategy: Any = None, **options: Any) -> Any:
    return dist_checkpointing.load(state, path, BcpLoadStrategy() if strategy is None else strategy, **options)


def raised(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """Checks that every rank raises ``kind``, and returns the message."""
    said: list[Any] = [None] * dist.get_world_size()
    error: BaseException | None = None
    try:
        call()
    except Exception as caught:
        error = caught
    dist.all_gather_object(said, f"{type(error).__name__}: {error}")
    assert isinstance(error, kind), said
    return str(error)


def rows(start: float = 0.0, size: int = 4, **options: Any) -> ShardedTensor:
    """The half of a matrix that this rank has."""
    rank = dist.get_rank()
    data = torch.arange(size * 3.0).reshape(size, 3) + size * 3 * rank + start
    return of_ranks("rows", data, (0, rank, 2), **options)


def kinds(root: str) -> None:
    """Everything that a ShardedTensor and a ShardedObject can say."""
    path = folder(root, "kinds")
    save(golden.state(), path)
    for strategy in (BcpLoadStrategy(), TorchDistLoadShardedStrategy()):
        wanted = golden.state()
        for shard in shards(wanted):
            shard.data.zero_()
        loaded = load(wanted, path, strategy)
        expected = golden.state()
        for key, shard in expected["model"].items():
            assert torch.equal(loaded["model"][key], shard.data), key
        for key, shard in expected["layers"].items():
            assert torch.equal(loaded["layers"][key], shard.data), key
        assert torch.equal(loaded["stacked"], expected["stacked"].data)
        assert {key: one.data for key, one in expected["objects"].items()} == loaded["objects"]
        assert loaded["args"] == golden.COMMON["args"]


def other_shapes(root: str) -> None:
    """``allow_shape_mismatch``: what is stored within the wanted shape is loaded, the rest is zero."""
    path = folder(root, "other_shapes")
    save({"rows": rows()}, path)
    for size in (3, 4, 5, 9):
        found = []
        for strategy in (BcpLoadStrategy(), TorchDistLoadShardedStrategy()):
            wanted = rows(start=100, size=size, allow_shape_mismatch=True)
            found.append(load({"rows": wanted}, path, strategy)["rows"])
        assert torch.equal(*found), (size, found)
        full = torch.cat([torch.arange(24.0).reshape(8, 3), torch.zeros(10, 3)])
        assert torch.equal(found[0], full[size * dist.get_rank() :][:size]), (size, found)
    said = raised(ShapeMismatchError, lambda: load({"rows": rows(size=5)}, path))
    assert "'rows'" in said, said
    full_rank = of_ranks("rows", torch.zeros(8), replica_id=dist.get_rank(), allow_shape_mismatch=True)
    raised(ShapeMismatchError, lambda: load({"rows": full_rank}, path))


def stored_otherwise(root: str) -> None:
    """Twice the same rows, another dtype, a tensor without data, rows that are no contiguous memory."""
    path = folder(root, "stored_otherwise")
    save({"rows": rows()}, path)
    wanted: dict[str, Any] = {"once": rows(9), "twice": {1: rows(8)}, "none": [rows(7)]}
    wanted["none"][0].data = None
    turned = rows()
    turned.data = torch.zeros(3, 4).t()
    wanted["turned"] = turned
    loaded = load(wanted, path, validate_access_integrity=False)
    for value in (loaded["once"], loaded["twice"][1], loaded["none"][0], loaded["turned"]):
        assert torch.equal(value, rows().data), loaded
    assert loaded["turned"].data_ptr() == turned.data.data_ptr()
    half = of_ranks("rows", torch.zeros(4, 3, dtype=torch.bfloat16), (0, dist.get_rank(), 2))
    assert torch.equal(load({"rows": half}, path)["rows"], rows().data.bfloat16())


def strictness(root: str) -> None:
    """Keys that are missing, or that nobody asks for."""
    path = folder(root, "strictness")
    save({"rows": rows(), "more": ShardedObject("more", 5, (1,), (0,), dist.get_rank())}, path)

    def asked() -> dict[str, Any]:
        return {"rows": rows(9), "other": of_ranks("other", torch.zeros(2), replica_id=dist.get_rank())}

    said = raised(KeyMismatchError, lambda: load(asked(), path))
    assert "'other'" in said, said
    raised(CheckpointingException, lambda: load(asked(), path, strict="raise_unexpected"))
    for strategy in (BcpLoadStrategy(), TorchDistLoadShardedStrategy()):
        loaded, missing, unexpected = load(asked(), path, strategy, strict="return_all")
        assert (missing, unexpected) == ({"more"}, {"other"}), (missing, unexpected)
        assert torch.equal(loaded["rows"], rows().data)
        assert "other" not in loaded


def metadata(root: str) -> None:
    """What Megatron reads of a checkpoint without loading it."""
    path = folder(root, "metadata")
    state = {"rows": rows(), "object": ShardedObject("object", 5, (2,), (dist.get_rank(),)), "common": 3}
    dist_checkpointing.save(state, path, BcpSaveStrategy(), content_metadata={"a": 1})
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    for strategy in (BcpLoadStrategy(), TorchDistLoadShardedStrategy()):
        tensors = dist_checkpointing.load_tensors_metadata(path, strategy)
        assert {key: (one.global_shape, one.dtype) for key, one in tensors.items()} == {"rows": ((8, 3), torch.float32)}
        all_of_it = {*dist_checkpointing.serialization.load_sharded_metadata(path, strategy)}
        assert all_of_it - {"common_state/shard_0_1"} == {"rows", "object/shard_0_2", "object/shard_1_2"}
    plain = dist_checkpointing.load_plain_tensors(path)
    assert torch.equal(plain["rows"], torch.arange(24.0).reshape(8, 3))
    assert dist_checkpointing.load_common_state_dict(path)["common"] == 3
    assert dist_checkpointing.serialization.load_content_metadata(path) == {"a": 1}


def again(root: str) -> None:
    """A second save into the same folder, with other values."""
    path = folder(root, "again")
    # Hashes of all files, which Megatron-Core 0.19 can make.
    checks = {"verify_integrity": True} if hasattr(dist_checkpointing.serialization, "save_integrity_manifest") else {}
    for start in (0, 50):
        dist_checkpointing.save({"rows": rows(start), "number": start}, path, BcpSaveStrategy(), **checks)
        loaded = load({"rows": rows(7)}, path, **checks)
        assert torch.equal(loaded["rows"], rows(start).data)
        assert loaded["number"] == start


def damage(root: str) -> None:
    """A byte that has changed: all ranks get the error."""
    path = folder(root, "damage")
    save({"rows": rows()}, path)
    if dist.get_rank() == 0:
        (data,) = Path(path).glob("__1_*.distcp")
        content = bytearray(data.read_bytes())
        at = content.index(rows(12).data.numpy().tobytes()[:8])
        content[at] ^= 1
        data.write_bytes(content)
    dist.barrier()
    register()
    said = raised(CorruptCheckpointError, lambda: load({"rows": rows()}, path, TorchDistLoadShardedStrategy()))
    unregister()
    assert ".distcp" in said, said
    load({"rows": rows()}, path, TorchDistLoadShardedStrategy())  # Megatron's own does not see it


def failures(root: str) -> None:
    """What one rank cannot save, no rank saves; the folder is free for the next save."""
    path = folder(root, "failures")

    def bad() -> dict[str, Any]:
        state = {"rows": rows()}
        if dist.get_rank() == 1:
            state["rows"].data = None
        return state

    said = raised(InvalidPlanError, lambda: save(bad(), path))
    assert "'rows': the ShardedTensor has no data" in said, said
    assert not (Path(path) / ".metadata").exists()
    assert not dist_checkpointing.check_is_distributed_checkpoint(path)
    request = BcpSaveStrategy().async_save(bad(), path)
    raised(InvalidPlanError, request.execute_sync)
    hint = BcpSaveStrategy()
    hint.separation_hint = "optimizer"
    raised(UnsupportedError, lambda: dist_checkpointing.save({"rows": rows()}, path, hint))
    raised(UnsupportedError, lambda: BcpSaveStrategy().async_save({"rows": rows()}, path, "nvrx"))
    save({"rows": rows()}, path)

    def mixed() -> dict[str, Any]:
        return {"rows": rows() if dist.get_rank() == 0 else 3}

    raised(InvalidPlanError, lambda: BcpLoadStrategy().load(mixed(), path))
    assert torch.equal(load({"rows": rows(7)}, path)["rows"], rows().data)


def late_failure(root: str) -> None:
    """A save in the background that fails: finalizing it raises on all ranks, and nothing is a checkpoint."""
    path = folder(root, "late_failure")
    options: dict[str, Any] = {}
    if hasattr(dist_checkpointing.serialization, "save_integrity_manifest"):
        options["async_strategy"] = "mcore"
    queue = AsyncCallsQueue()
    state = {"rows": rows()}
    if dist.get_rank() == 1:
        state["half"] = of_ranks("half", torch.ones(3), (0, 1, 2))  # nobody has the other half
    request = dist_checkpointing.save(
        state, path, BcpSaveStrategy(), validate_access_integrity=False, async_sharded_save=True, **options
    )
    queue.schedule_async_request(request)
    said = raised(CheckpointError, lambda: queue.maybe_finalize_async_calls(blocking=True))
    assert "'half'" in said, said
    assert not dist_checkpointing.check_is_distributed_checkpoint(path)


def odd_objects(root: str) -> None:
    """Objects that weights_only does not know load only where that is asked for."""
    path = folder(root, "odd_objects")
    save({"odd": ShardedObject("odd", Odd(), (1,), (0,), dist.get_rank())}, path)
    wanted = ShardedObject("odd", None, (1,), (0,), dist.get_rank())
    said = raised(UnsafeObjectError, lambda: load({"odd": wanted}, path))
    assert "allow_pickle" in said, said
    loaded = load({"odd": wanted}, path, BcpLoadStrategy(config=Config(allow_pickle=True)))
    assert isinstance(loaded["odd"], Odd)


CASES = [
    kinds,
    other_shapes,
    stored_otherwise,
    strictness,
    metadata,
    again,
    damage,
    failures,
    late_failure,
    odd_objects,
]


def main() -> None:
    for case in CASES:
        if case.__name__ in (sys.argv[2:] or [case.__name__]):
            run(2, case, sys.argv[1])
            print(f"{case.__name__}: passed", flush=True)


if __name__ == "__main__":
    main()

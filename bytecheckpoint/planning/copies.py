# SPDX-License-Identifier: Apache-2.0
"""Copies: what several ranks hold under one key although torch does not keep it equal. A save compares them."""

from __future__ import annotations

import hashlib
import io
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.tensors.chunks import LocalChunks

__all__ = ["Differing", "copies_of", "judge", "seed_of"]

Differing = tuple[str, str, list[list[int]]]
"""A key, what it is, and the ranks: those that hold equal copies together, the lowest rank first."""

# Numbers of meshes: see `CopyQuestions` in csrc/bridge/copies_of_state.h.
_UNKNOWN, _ALL, _FIRST_NAMED = 0, 1, 2

_MOST_KEYS = 10
_MOST_RANKS = 4


def seed_of(checkpoint_id: object) -> int:
    """Returns the number that draws which blocks of large tensors a save to this path compares.

    All ranks must look at the same blocks before they have sent one another anything. So the number is made of the last
    part of the path, which is mostly the step: from one save of a run to the next, other blocks are looked at.
    """
    name = Path(str(checkpoint_id)).name if checkpoint_id else ""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def copies_of(state: _C.LocalState, *, compares: bool, num_ranks: int, seed: int) -> _C.CopiesOfState:
    """Returns what this rank holds of which other ranks may hold copies.

    Args:
        state: What this rank holds.
        compares: Whether to compute checksums.
        num_ranks: Number of ranks of the save.
        seed: From ``seed_of``.
    """

    def mesh_of(value: Any) -> int:
        ranks = _ranks_of(value)
        if ranks is None:
            return _UNKNOWN
        if len(ranks) == (dist.get_world_size() if dist.is_initialized() else num_ranks):
            return _ALL
        return _FIRST_NAMED + zlib.crc32(repr(sorted(ranks)).encode()) % (2**32 - _FIRST_NAMED)

    return _C.CopiesOfState(
        state, compares=compares, seed=seed, mesh_of=mesh_of, shards_of=_shards_of, checksum_of=_checksum_of
    )


def _ranks_of(value: Any) -> Sequence[int] | None:
    """Returns the ranks that hold a sharded tensor together; None if it does not say."""
    if isinstance(value, DTensor):
        ranks: list[int] = value.device_mesh.mesh.flatten().tolist()
        return ranks
    if isinstance(value, LocalChunks):
        return value.ranks
    if isinstance(value, ShardedTensor):
        placements = [shard.placement for shard in value.metadata().shards_metadata]
        ranks_of_shards = {placement.rank() for placement in placements if placement is not None}
        return [rank for rank in ranks_of_shards if rank is not None]
    return None


def _shards_of(value: Any) -> list[Any]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local()] if isinstance(value, DTensor) else []


def _checksum_of(value: Any) -> int | None:
    """Returns a checksum of what torch.save makes of a value; None if it fails, which the writing will report."""
    buffer = io.BytesIO()
    try:
        torch.save(value.detach().cpu() if isinstance(value, torch.Tensor) else value, buffer)
    except Exception:
        return None
    return zlib.crc32(buffer.getbuffer())


_named: PerProcess[set[tuple[str, str]]] = PerProcess(set)


def judge(differing: Sequence[Differing], mode: str, path: object) -> None:
    """Reports keys of which ranks hold different copies. Runs on the coordinator, before anything is written.

    Args:
        differing: The keys.
        mode: ``Config.differing_copies``. With ``warn``, a process names each key once.
        path: Path of the checkpoint.

    Raises:
        InvalidPlanError: Any copies differ, and ``mode`` is ``check``.
    """
    if mode == "check" and differing:
        raise InvalidPlanError(
            f"save({path}): ranks hold different copies under the same key: {_described(differing)}. Give each rank "
            'its own key, or make them equal; Config(differing_copies="warn") saves those of the lowest rank'
        )
    fresh = [copy for copy in differing if copy[:2] not in _named.get()]
    if mode != "warn" or not fresh:
        return
    _named.get().update(copy[:2] for copy in fresh)
    warnings.warn(
        f"bytecheckpoint: save({path}): ranks hold different copies under the same key, and the checkpoint gets those "
        f"of the lowest rank: {_described(fresh)}. What each rank needs back must have a key for each rank. This is "
        'said once for each key; Config(differing_copies="check") makes it an error, "trust" compares nothing',
        RuntimeWarning,
        stacklevel=2,
    )


def _described(differing: Sequence[Differing]) -> str:
    texts = [
        f"'{fqn}' ({kind}: {listed([*map(_ranks_text, ranks)], _MOST_RANKS).replace(', ', ' against ')})"
        for fqn, kind, ranks in differing[:_MOST_KEYS]
    ]
    return listed(texts, _MOST_KEYS, len(differing))


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + listed([*map(str, ranks)], _MOST_RANKS).replace(", ", "+")

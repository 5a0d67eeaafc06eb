# SPDX-License-Identifier: Apache-2.0
"""Collectives of Python objects that call the methods of a gloo process group directly.

The functions of ``torch.distributed`` look a group up in a registry of the process, and ``destroy_process_group()``
clears that registry. A background save must go on with the ranks that it was called with, even then.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bytecheckpoint.distributed.lent_tensors import lend
from bytecheckpoint.distributed.waits import Collective

__all__ = ["all_gather", "all_reduce_max", "barrier", "begin_gather", "broadcast", "gather", "scatter"]

_c10d: Any = dist.distributed_c10d


def all_reduce_max(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replaces each element of ``tensor``, which is in host memory, by the largest one of all ranks."""
    options = _c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    Collective(group.allreduce([lend(tensor)], options), group).wait()


def all_gather(group: dist.ProcessGroup, value: object) -> list[Any]:
    """Returns ``value`` of each rank, by rank, on all ranks."""
    data = pickle.dumps(value)
    sizes = _all_sizes(group, data)
    received = [bytearray(max(sizes)) for _ in sizes]
    mine = _view(_padded(data, max(sizes)))
    Collective(group.allgather([[lend(_view(buffer)) for buffer in received]], [lend(mine)]), group).wait()
    return [pickle.loads(buffer) for buffer in received]  # a pickle says where it ends


def gather(group: dist.ProcessGroup, value: object, root: int) -> list[Any] | None:
    """Returns ``value`` of each rank, by rank, on rank ``root`` of the group; None on the others."""
    data = pickle.dumps(value)
    sizes = _all_sizes(group, data)
    received = [bytearray(max(sizes)) for _ in sizes] if group.rank() == root else []
    mine = _view(_padded(data, max(sizes)))
    begin_gather(group, mine, [_view(buffer) for buffer in received], root).wait()
    return [pickle.loads(buffer) for buffer in received] if received else None


def begin_gather(group: dist.ProcessGroup, tensor: torch.Tensor, gathered: list[torch.Tensor], root: int) -> Collective:
    """Begins to fill ``gathered``, by rank, with ``tensor`` of each rank, on rank ``root``; it is empty on the others.

    Works with any backend; the tensors must be on a device that the backend takes.
    """
    options = _c10d.GatherOptions()
    options.rootRank = root
    lent = [[lend(of_rank) for of_rank in gathered]] if gathered else []
    return Collective(group.gather(lent, [lend(tensor)], options), group)


def scatter(group: dist.ProcessGroup, values: Sequence[object] | None, root: int) -> Any:
    """Returns the value for this rank, out of the values by rank that rank ``root`` gives; the others give None."""
    data = [pickle.dumps(value) for value in values or ()]
    size = torch.tensor([max(map(len, data), default=0)], dtype=torch.int64, device="cpu")
    _broadcast(group, size, root)
    mine = bytearray(int(size))
    options = _c10d.ScatterOptions()
    options.rootRank = root
    inputs = [[lend(_view(_padded(of_rank, len(mine)))) for of_rank in data]] if data else []
    Collective(group.scatter([lend(_view(mine))], inputs, options), group).wait()
    return pickle.loads(mine)


def broadcast(group: dist.ProcessGroup, value: object, root: int) -> Any:
    """Returns ``value`` of rank ``root`` of the group, on all ranks."""
    data = bytearray(pickle.dumps(value)) if group.rank() == root else bytearray()
    size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    _broadcast(group, size, root)
    if group.rank() != root:
        data = bytearray(int(size))
    _broadcast(group, _view(data), root)
    return pickle.loads(data)


def barrier(group: dist.ProcessGroup) -> None:
    """Waits until all ranks have called it."""
    Collective(group.barrier(), group).wait()


def _broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, root: int) -> None:
    options = _c10d.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    Collective(group.broadcast([lend(tensor)], options), group).wait()


def _all_sizes(group: dist.ProcessGroup, data: bytes) -> list[int]:
    sizes = torch.zeros(group.size(), dtype=torch.int64, device="cpu")
    work = group.allgather(
        [[lend(sizes[rank : rank + 1]) for rank in range(group.size())]],
        [lend(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))],
    )
    Collective(work, group).wait()
    of_ranks: list[int] = sizes.tolist()
    return of_ranks


def _padded(data: bytes, size: int) -> bytearray:
    """Returns ``data`` padded to ``size`` bytes: gloo needs memory of the same size from all ranks."""
    return bytearray(data.ljust(size, b"\0"))


def _view(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)

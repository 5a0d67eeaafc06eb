# SPDX-License-Identifier: Apache-2.0
"""Stops background saves at each of their exchanges, and begins and ends process groups around them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import async_save_state_dict, load_state_dict, verify
from bytecheckpoint.dcp import _group_flow

__all__ = [
    "EXCHANGES",
    "LIMIT_S",
    "STAGES",
    "Hold",
    "begin_world",
    "check_whole",
    "full",
    "save",
    "sharded",
]

LIMIT_S = 30.0

# The exchanges of DCP's flow: plans to the coordinator and back, results to the coordinator, and the outcome back.
EXCHANGES = ("gather_object", "scatter_object", "gather_object", "broadcast_object")
STAGES = tuple(itertools.product(range(len(EXCHANGES)), ("before", "after")))


class Hold:
    """Stops the thread of a background save before or after its ``number``-th exchange."""

    def __init__(self, number: int, when: str) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self._number, self._when = number, when
        self._seen = 0

    def stop(self) -> None:
        self.arrived.set()
        assert self.go_on.wait(LIMIT_S)

    def patch(self, of: type = _group_flow._GroupWrapper) -> Callable[[], None]:
        """Makes the exchanges of this process go through this object. Returns a function that ends that."""
        theirs = {name: getattr(of, name) for name in set(EXCHANGES)}

        def held(name: str) -> Callable[..., Any]:
            def exchange(wrapper: Any, value: Any) -> Any:
                number, self._seen = self._seen, self._seen + 1
                is_here = number == self._number
                if is_here and self._when == "before":
                    self.stop()
                result = theirs[name](wrapper, value)
                if is_here and self._when == "after":
                    self.stop()
                return result

            return exchange

        def unpatch() -> None:
            for name, method in theirs.items():
                setattr(of, name, method)

        for name in theirs:
            setattr(of, name, held(name))
        return unpatch

    @contextmanager
    def patched(self, of: type = _group_flow._GroupWrapper) -> Iterator[Hold]:
        unpatch = self.patch(of)
        try:
            yield self
        finally:
            unpatch()


def full(number: int) -> torch.Tensor:
    return torch.arange(32.0).reshape(8, 4) + number


def sharded(number: int) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(full(number), mesh, [Shard(0)])


class Sharded(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(sharded(number))


def save(how: str, path: Path, number: int) -> Future[Any]:
    """Begins to save a tensor that is sharded over all ranks and a value of each rank. Returns the future."""
    if how == "parts":
        extra = {"rank": dist.get_rank(), "number": number}
        state = {"model": Sharded(number), "extra_state": extra}
        return bytecheckpoint.save(path, state, "fsdp2", fast_saving=True, global_steps=number).committed
    state = {"model": {"weight": sharded(number)}, "of_rank": {str(dist.get_rank()): number}}
    if how == "own":
        return async_save_state_dict(path, state).committed
    future: Any = dcp.async_save(state, checkpoint_id=path)
    return future


def check_whole(how: str, path: Path, number: int, num_ranks: int) -> None:
    """Asserts that all of the checkpoint loads, bit for bit, into one process."""
    if how == "parts":
        latest = bytecheckpoint.find_latest_ckpt_path(path)
        assert latest == str(path / f"global_step_{number}")
        path = Path(latest)
        got: dict[str, Any] = {"weight": torch.zeros(8, 4)}
        load_state_dict(path / "model", got, no_dist=True)
        assert torch.equal(got["weight"], full(number))
        assert not verify(path / "model").problems
        assert not verify(path / "extra_state").problems
        return
    got = {"model": {"weight": torch.zeros(8, 4)}, "of_rank": {str(rank): -1 for rank in range(num_ranks)}}
    load_state_dict(path, got, no_dist=True)
    assert torch.equal(got["model"]["weight"], full(number))
    assert got["of_rank"] == {str(rank): number for rank in range(num_ranks)}
    assert not verify(path).problems


def begin_world(directory: Path, number: int, ranks: list[int], rank: int, timeout_s: float = 5.0) -> None:
    """Makes a default group of ``ranks`` over a new store, and waits until all ranks have it.

    torch lets a rank continue as soon as that rank is connected. If it then destroyed the group at once, it would break
    the connections that others are still making.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store.{number}.{ranks[0]}",
        rank=ranks.index(rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=timeout_s),
    )
    dist.barrier()

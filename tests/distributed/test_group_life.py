# SPDX-License-Identifier: Apache-2.0
"""Process groups that end, or are made anew, while a background save is under way: what it was called with counts.

A save is held before and after each of its exchanges with other ranks, and everywhere the groups are destroyed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._async_thread_executor as executor
from torch.distributed.checkpoint.utils import _DistWrapper as DcpWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import BcpStager, BcpWriter, async_save_state_dict, load_state_dict, registered, scan_steps, verify
from bytecheckpoint.dcp import _compat
from bytecheckpoint.errors import ConfigError
from distributed.ranks import run_ranks

LIMIT_S = 30.0
# For ranks in DCP's own exchanges, which have met another world.
WAIT_S = 2.0

# Each exchange of DCP's flow: plans to the coordinator and back, results to the coordinator and what became of them.
EXCHANGES = ("gather_object", "scatter_object", "gather_object", "broadcast_object")
STAGES = tuple(itertools.product(range(len(EXCHANGES)), ("before", "after")))
HOWS = ("own", "parts", "registered")


class Hold:
    """Stops the thread of a background save before or after its ``number``-th exchange."""

    def __init__(self, number: int, when: str) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self._number, self._when = number, when
        self._seen = 0

    def stop(self) -> None:
        self.arrived.set()
        assert self.go_on.wait(LIMIT_S)

    def patch(self, of: type = _compat._GroupWrapper) -> Callable[[], None]:
        """From now on exchanges of this process pass here; what is returned ends that."""
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
    def patched(self, of: type = _compat._GroupWrapper) -> Iterator[Hold]:
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
    """Begins to save a tensor that is sharded over all ranks, and something of each rank."""
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
    """All of it loads, bit for bit, into one process."""
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


def begin_world(directory: Path, number: int, ranks: list[int], rank: int, timeout_s: float = LIMIT_S) -> None:
    """A default group of ``ranks``, over a store of its own."""
    store = f"file://{directory}/store.{number}.{ranks[0]}"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=store, rank=ranks.index(rank), world_size=len(ranks), timeout=timeout)


def destroy_at_every_stage(directory: Path, how: str, is_first: bool, then: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    everybody = [*range(num_ranks)]
    dist.barrier()
    dist.destroy_process_group()
    with registered():
        for number, (exchange, when) in enumerate(STAGES):
            path = directory / f"run-{number}"
            begin_world(directory, 2 * number, everybody, rank)
            if not is_first:
                save(how, path, 1).result(LIMIT_S)
            with Hold(exchange, when).patched() as hold:
                future = save(how, path, 2)
                assert hold.arrived.wait(LIMIT_S)
                if then == "barrier":
                    dist.barrier()
                dist.destroy_process_group()
                if then == "another world":
                    begin_world(directory, 2 * number + 1, [rank], rank)
                elif then == "other ranks":
                    begin_world(directory, 2 * number + 1, everybody[::-1], rank)
                hold.go_on.set()
                future.result(LIMIT_S)
            if then in ("another world", "other ranks"):
                dist.destroy_process_group()
            check_whole(how, path, 2, num_ranks)
    begin_world(directory, -1, everybody, rank)


@pytest.mark.parametrize("then", ["nothing", "barrier", "another world", "other ranks"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("how", HOWS)
def test_a_save_goes_on_without_the_group(tmp_path: Path, how: str, is_first: bool, then: str) -> None:
    run_ranks(2, destroy_at_every_stage, tmp_path, how, is_first, then)


@pytest.mark.parametrize("how", HOWS)
def test_a_save_goes_on_without_the_group_on_four_ranks(tmp_path: Path, how: str) -> None:
    run_ranks(4, destroy_at_every_stage, tmp_path, how, True, "nothing")


def plain_async_save(how: str, path: Path, number: int) -> Future[Any]:
    """Through DCP alone, over the default group, as it is when the save comes to each exchange."""
    state = {"model": {"weight": sharded(number)}, "of_rank": {str(dist.get_rank()): number}}
    if how == "stock writer":
        writer: Any = dcp.FileSystemWriter(path)
        return dcp.async_save(state, storage_writer=writer, async_stager=BcpStager())  # type: ignore[return-value]
    return dcp.async_save(state, storage_writer=BcpWriter(path))  # type: ignore[return-value]


def destroy_under_plain_dcp(directory: Path, how: str, then: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    everybody = [*range(num_ranks)]
    dist.barrier()
    dist.destroy_process_group()
    # Before the save begins, too: there no exchange has been.
    for number, stage in enumerate((None, *STAGES)):
        path = directory / f"run-{number}"
        begin_world(directory, 2 * number, everybody, rank)
        plain_async_save(how, path, 1).result(LIMIT_S)
        hold = Hold(*stage or (0, "before"))
        with hold.patched(DcpWrapper) if stage else held_before_begin(hold):
            future = plain_async_save(how, path, 2)
            assert hold.arrived.wait(LIMIT_S)
            dist.barrier()
            dist.destroy_process_group()
            if then == "another world":
                begin_world(directory, 2 * number + 1, [rank], rank, WAIT_S)
            elif then == "other ranks":
                begin_world(directory, 2 * number + 1, everybody[::-1], rank, WAIT_S)
            hold.go_on.set()
            error = future.exception(LIMIT_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        found = scan_steps(directory, pattern=rf"run-({number})")[0]
        is_committed = stage is not None and EXCHANGES[stage[0]] == "broadcast_object"
        if how == "our writer" or stage is None:
            assert found.is_complete, found
            check_whole("own", path, 2 if is_committed else 1, num_ranks)
        else:
            # It writes over the old one, and asks nobody whether ranks are missing: then nobody calls it whole.
            assert found.state in ("complete", "incomplete", "half", "corrupt")
        if how == "our writer" and rank == 0 and then != "other ranks":  # there DCP hears of the end from another rank
            assert (error is None) == is_committed or then == "nothing"
    begin_world(directory, -1, everybody, rank)


@contextmanager
def held_before_begin(hold: Hold) -> Iterator[None]:
    """Holds the thread of DCP's executor before it asks whether there are groups."""
    theirs = executor.save_wrapper

    def held(*args: Any, **kwargs: Any) -> Any:
        hold.stop()
        return theirs(*args, **kwargs)

    executor.save_wrapper = held
    try:
        yield
    finally:
        executor.save_wrapper = theirs


@pytest.mark.parametrize("then", ["nothing", "another world", "other ranks"])
@pytest.mark.parametrize("how", ["our writer", "stock writer"])
def test_plain_dcp_is_whole_or_fails(tmp_path: Path, how: str, then: str) -> None:
    run_ranks(2, destroy_under_plain_dcp, tmp_path, how, then)


def save_over_destroyed_group(path: Path) -> None:
    group = dist.new_group(backend="gloo")
    dist.destroy_process_group(group)
    with pytest.raises(ConfigError, match="process_group was destroyed before the call"):
        async_save_state_dict(path, {"weight": sharded(0)}, process_group=group)
    assert not path.exists()


def test_a_group_that_is_gone_is_refused(tmp_path: Path) -> None:
    run_ranks(2, save_over_destroyed_group, tmp_path / "ckpt")

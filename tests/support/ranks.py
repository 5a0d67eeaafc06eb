# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several gloo ranks, each a process of its own, within a time limit."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.preloaded import PRELOADED

__all__ = ["RanksFailed", "failures", "forked_with", "run_ranks"]

TESTS = Path(__file__).parents[1]

R = TypeVar("R")

# Ranks are forked from a server that has imported what most of them use, and has run nothing else. So every rank of
# every job has a new process, which costs tens of milliseconds, and no job sees what an earlier one left in memory.
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [*PRELOADED, "pytest"]
_CONTEXT.set_forkserver_preload(_PRELOADED)

# So long before the limit, ranks that hang write their stacks: they must have done so before they are killed.
_STACKS_BEFORE_LIMIT_S = 3.0


class RanksFailed(AssertionError):
    """Some ranks raised, died, or did not end in time; the message has every traceback."""


@dataclass(frozen=True)
class _Outcome:
    value: bytes = b""
    traceback: str = ""


def run_ranks(
    num_ranks: int, function: Callable[..., R], *args: Any, limit_s: float = 60.0, may_die: int | None = None
) -> list[R]:
    """Runs ``function(*args)`` on ``num_ranks`` ranks of a default gloo group, and returns what each of them returns.

    Args:
        function: At the top level of its module. It and ``args`` are pickled to the ranks, its value is pickled back.
        limit_s: All ranks are killed after this time.
        may_die: This rank need not return. Its value is left out, and ranks do not wait for each other at the end.

    Raises:
        RanksFailed: With the tracebacks of all ranks that raised; with the stacks of those that hung.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank_main,
                args=(sender, str(directory), rank, num_ranks, limit_s, may_die is None, function, args),
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            outcomes = _collect(pipes, limit_s, may_die)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        complaints = [
            _complaint(rank, outcome, directory)
            for rank, outcome in enumerate(outcomes)
            if rank != may_die or outcome is not None
        ]
    if any(complaints):
        raise RanksFailed("\n".join(text for text in complaints if text))
    return [pickle.loads(o.value) for rank, o in enumerate(outcomes) if o is not None and rank != may_die]


# Servers that have imported more, by what. They stay until this process ends.
_others: dict[tuple[str, ...], forkserver.ForkServer] = {}


@contextlib.contextmanager
def forked_with(*modules: str) -> Iterator[None]:
    """Within this context, ranks are forked from a server that has also imported ``modules``."""
    if modules not in _others:
        paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", paths)
            server = forkserver.ForkServer()
            server.set_forkserver_preload([*_PRELOADED, *modules])
            server.ensure_running()
        _others[modules] = server
    with pytest.MonkeyPatch.context() as patch:
        # What multiprocessing calls when a process starts.
        patch.setattr(forkserver, "connect_to_new_process", _others[modules].connect_to_new_process)
        yield


def failures(call: Callable[[], Any]) -> dict[int, BaseException]:
    """Returns what ``call`` raised inside DCP's CheckpointException, by rank. Fails if it raises nothing, or another.

    They are copies, as another rank would get them: an exception keeps alive the frames that it came through.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        call()
    except CheckpointException as error:
        return {rank: pickle.loads(pickle.dumps(wrapped[0])) for rank, wrapped in error.failures.items()}
    raise AssertionError("nothing was raised")


def _collect(
    pipes: list[multiprocessing.connection.Connection], limit_s: float, may_die: int | None
) -> list[_Outcome | None]:
    """Returns the outcomes by rank; None for a rank that sent nothing, because it died or the time was up.

    When a rank has failed, the others have two more seconds.
    """
    end = time.monotonic() + limit_s
    outcomes: list[_Outcome | None] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                outcome: _Outcome | None = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                outcome = None
            outcomes[rank] = outcome
            if (outcome is None and rank != may_die) or (outcome is not None and outcome.traceback):
                # The peers of a failed rank wait for it. What they report in the next moment may still explain more.
                end = min(end, time.monotonic() + 2.0)
    return outcomes


def _complaint(rank: int, outcome: _Outcome | None, directory: Path) -> str:
    if outcome is None:
        stacks = directory / f"stacks.{rank}"
        text = stacks.read_text() if stacks.exists() else ""
        return f"rank {rank} did not end, or died\n{text}"
    return f"rank {rank} raised\n{outcome.traceback}" if outcome.traceback else ""


def _rank_main(
    sender: multiprocessing.connection.Connection,
    directory: str,
    rank: int,
    num_ranks: int,
    limit_s: float,
    wait: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with (Path(directory) / f"stacks.{rank}").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(max(limit_s - _STACKS_BEFORE_LIMIT_S, 1.0), file=stacks)
        try:
            dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks)
            dist.barrier()  # a rank that destroyed its group at once would break connections that others still make
            value = pickle.dumps(function(*args))
            if wait:  # no rank leaves while another may still need it
                dist.barrier()
            outcome = _Outcome(value=value)
            dist.destroy_process_group()
        except BaseException:
            text = io.StringIO()
            traceback.print_exc(file=text)
            outcome = _Outcome(traceback=text.getvalue())
        faulthandler.cancel_dump_traceback_later()
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()

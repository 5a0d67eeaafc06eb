# SPDX-License-Identifier: Apache-2.0
"""Makes all public calls in each circumstance of a process: its end, a daemon thread, a hook, a fork, an error."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.public_calls import CALLS, LIMIT_S, Place
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint as bcp
from bytecheckpoint.runtime.fork_locks import _all as all_locks
from bytecheckpoint.staging import leases as _leases


def say(text: str) -> None:
    """Writes ``text`` to the process that waits for this one. Python's own file objects may be closed by then."""
    os.write(1, f"{text}\n".encode())


# Messages of calls that cannot work in their circumstance.
REFUSALS = (
    "cannot schedule new futures after interpreter shutdown",  # DCP's own executor, whoever stages and writes
    "staging: this process is a forked child, and the memory belongs to process ",
    "a hook of a background save waits for its own save, or for a later one of the same queue",
    "waited 1 s for memory that an earlier state takes, though no save of that state is under way",
    "shutdown(): a hook of a background save calls it, and it would wait for that same save",
)


def run_all(at: Path, ready: Path) -> None:
    """Makes all calls, one after the other, and writes how each of them ended."""
    for call in CALLS:
        try:
            call.run(Place(at / str(call), ready))
        except (bcp.CheckpointError, RuntimeError) as error:
            is_refused = any(refusal in str(error) for refusal in REFUSALS)
            say(f"{call} refused" if is_refused else f"{call} FAILED: {traceback.format_exc()}")
        except BaseException:
            say(f"{call} FAILED: {traceback.format_exc()}")
        else:
            say(str(call))


# At the end of the interpreter.


def in_a_thread(work: Callable[[], None]) -> None:
    def wait_and_work() -> None:
        threading.main_thread().join()
        work()

    threading.Thread(target=wait_and_work).start()


def before_threads_end(work: Callable[[], None]) -> None:
    threading._register_atexit(work)  # type: ignore[attr-defined]


def at_exit(work: Callable[[], None]) -> None:
    atexit.register(work)


MOMENTS = (in_a_thread, before_threads_end, at_exit)


def work_at_the_end(
    rank: int, at: Path, ready: Path, moment: Callable[[Callable[[], None]], None], used_before: bool
) -> None:
    """Makes all calls at ``moment``.

    Args:
        used_before: Whether the package itself does its work at the end of the process later than ``moment``; if not,
            it does that work before.
    """
    if used_before:
        bcp.async_save_state_dict(at / "before", {"weight": torch.ones(3)}, no_dist=True)
    moment(lambda: run_all(at, ready))
    if not used_before and moment is not in_a_thread:
        bcp.async_save_state_dict(at / "before", {"weight": torch.ones(3)}, no_dist=True)


# In a daemon thread at the end of the interpreter.


class _End:
    """Python deletes this object when it has begun to end daemon threads that want the GIL.

    The object then sleeps for a while without the GIL, so that those threads can get it.

    Args:
        is_cut_short: Whether the process then ends at once. Python would need a second to delete torch's modules.
    """

    def __init__(self, is_cut_short: bool) -> None:
        self._is_cut_short = is_cut_short

    def __del__(self) -> None:
        time.sleep(0.2)
        if self._is_cut_short:
            os._exit(0)


def end_while_a_daemon_is_inside(work: Callable[[Callable[[], None]], None], is_cut_short: bool) -> None:
    """Runs ``work`` in a daemon thread, and ends the interpreter meanwhile.

    Once ``work`` has called its argument, the interpreter ends as soon as ``work`` releases the GIL.
    """
    go, inside = threading.Lock(), threading.Lock()
    go.acquire()
    inside.acquire()

    def run() -> None:
        with go:
            try:
                work(inside.release)
            except BaseException:
                say(traceback.format_exc())
            if inside.locked():
                inside.release()

    def end() -> None:
        go.release()
        inside.acquire()
        sys.setswitchinterval(1000.0)  # from now on this thread has the GIL until it releases it itself

    sys.last_value = _End(is_cut_short)  # type: ignore[assignment]  # Python deletes this first
    atexit._run_exitfuncs()  # runs the others now, so that nothing comes between `end` and the end of threads
    atexit.register(end)
    threading.Thread(target=run, daemon=True).start()


def profiled(work: Callable[[], None], look: Callable[[str, str], None]) -> None:
    """Runs ``work``, and calls ``look`` with the event and the name when a function of our C++ is called or returns."""

    def profile(frame: Any, event: str, of: Any) -> None:
        if event in ("c_call", "c_return") and str(getattr(of, "__module__", "")).startswith("bytecheckpoint."):
            look(event, of.__name__)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)


def find_places(rank: int, at: Path, ready: Path) -> None:
    """Writes for each call which functions of our C++ release the GIL in it."""
    look_now, has_looked = threading.Lock(), [False]
    look_now.acquire()

    def other() -> None:
        while True:
            look_now.acquire()
            has_looked[0] = True

    def at_the_end() -> None:
        sys.setswitchinterval(1000.0)
        threading.Thread(target=other, daemon=True).start()
        for call in CALLS:
            names: list[str] = []

            def look(event: str, name: str, names: list[str] = names) -> None:
                if event == "c_call":
                    has_looked[0] = False
                    if look_now.locked():
                        look_now.release()
                elif has_looked[0] and name not in names:
                    names.append(name)

            with contextlib.suppress(RuntimeError):
                profiled(lambda call=call: call.run(Place(at / str(call), ready)), look)  # type: ignore[misc]
            say(" ".join((str(call), *names)))

    atexit.register(at_the_end)
    bcp.shutdown()


def be_inside(rank: int, at: Path, ready: Path, places: list[tuple[str, str]], is_cut_short: bool) -> None:
    """Ends the interpreter while a public call is in a function of our C++."""
    of, function = places[rank]
    call = next(call for call in CALLS if str(call) == of)

    def work(tell: Callable[[], None]) -> None:
        tells = [tell]

        def look(event: str, name: str) -> None:
            if not tells:
                say(f"went on to {event} {name}")
            elif event == "c_call" and name == function:
                tells.pop()()
                # During this loop the main thread wakes up and asks for the GIL. It gets the GIL when our C++ releases
                # it, and not before: from here on, no step checks whether another thread has asked for it.
                1 in itertools.repeat(0, 5_000_000)  # noqa: B015

        profiled(lambda: call.run(Place(at / f"{of}-{function}", ready)), look)

    end_while_a_daemon_is_inside(work, is_cut_short)


class Copied:
    """Calls ``call`` when it is copied. Staging copies it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        self.call()
        return "copied"


class Asked:
    """A Stateful that calls ``call`` when it is asked for its state, and when it gets a state."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {"asked": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.call()


class Unclassed:
    """Calls ``call`` when it is asked for its class, as an abstract class asks when our C++ looks for mappings."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.calls = [call]

    @property
    def __class__(self) -> type:  # type: ignore[override]
        if self.calls:
            self.calls.pop()()
        return Unclassed


class Saving(bcp.BcpSavePlanner):
    """A planner that calls ``call`` while it resolves its first value."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.calls = [call]

    def resolve_data(self, item: Any) -> Any:
        if self.calls:
            self.calls.pop()()
        return super().resolve_data(item)


class Loading(bcp.BcpLoadPlanner):
    """A planner that calls ``call`` before its first tensor is filled."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.calls = [call]

    def resolve_tensor(self, item: Any) -> Any:
        if self.calls:
            self.calls.pop()()
        return super().resolve_tensor(item)


# Each of these functions makes a public call, in the middle of which it calls `call` once or a few times.

Hook = Callable[[Callable[[], None], Path, Path], object]


def in_save(call: Callable[[], None], at: Path, ready: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=bcp.BcpWriter(at), planner=Saving(call), no_dist=True)


def in_background_save(call: Callable[[], None], at: Path, ready: Path) -> None:
    bcp.async_save_state_dict(at, {"w": torch.ones(3)}, planner=Saving(call), no_dist=True).committed.result(LIMIT_S)


def in_staging(call: Callable[[], None], at: Path, ready: Path) -> None:
    bcp.async_save_state_dict(at, {"w": torch.ones(3), "odd": Copied(call)}, no_dist=True).committed.result(LIMIT_S)


def in_state_dict(call: Callable[[], None], at: Path, ready: Path) -> None:
    bcp.save_state_dict(at, {"odd": Asked(call)}, no_dist=True)


def in_load_state_dict(call: Callable[[], None], at: Path, ready: Path) -> None:
    bcp.save_state_dict(at, {"odd": {"asked": torch.ones(3)}}, no_dist=True)
    bcp.load_state_dict(at, {"odd": Asked(call)}, no_dist=True)


def in_flattening(call: Callable[[], None], at: Path, ready: Path) -> None:
    bcp.BcpSavePlanner().set_up_planner({"w": torch.ones(3), "odd": Unclassed(call)}, is_coordinator=True)


def in_load(call: Callable[[], None], at: Path, ready: Path) -> None:
    got = {"weight": torch.zeros(1000)}
    dcp.load(got, storage_reader=bcp.BcpReader(ready / "state"), planner=Loading(call), no_dist=True)
    assert torch.equal(got["weight"], torch.full((1000,), 7.0))


def in_verify(call: Callable[[], None], at: Path, ready: Path) -> None:
    calls = [call]
    bcp.verify(ready / "state", progress=lambda done, total: calls.pop()() if calls else None)


def in_callback(call: Callable[[], None], at: Path, ready: Path) -> None:
    bcp.save(at, {"model": torch.nn.Linear(2, 2)}, "ddp", callback=call)


HOOKS: tuple[Hook, ...] = (
    in_save,
    in_background_save,
    in_staging,
    in_state_dict,
    in_load_state_dict,
    in_flattening,
    in_load,
    in_verify,
    in_callback,
)


def be_in_a_hook(rank: int, at: Path, ready: Path) -> None:
    """Ends the interpreter while a daemon thread is in Python code that one of our calls has called."""

    def work(tell: Callable[[], None]) -> None:
        def call() -> None:
            tell()
            time.sleep(0.05)  # releases the GIL, and wants it back while the interpreter ends

        HOOKS[rank](call, at / str(rank), ready)

    end_while_a_daemon_is_inside(work, is_cut_short=True)


# In hooks of other calls.


def nest(rank: int, at: Path, ready: Path, hook: Hook) -> None:
    """Makes all calls in a hook of a save that runs in a hook of another call, in the same thread; then outside."""
    # The state of the outer call may be staged, too.
    os.environ["BYTECHECKPOINT_ON_STAGING_BUSY"] = "double_buffer"
    _leases._UNUSED_WAIT_S = 1.0
    calls = [lambda: in_save(lambda: run_all(at / "inner", ready), at / "middle", ready)]
    hook(lambda: calls.pop()() if calls else None, at / "outer", ready)
    assert not calls
    saved = [at / "middle", at / "outer" / "model" if hook is in_callback else at / "outer"]
    assert all(bcp.verify(path).is_whole for path in saved if path.exists())
    run_all(at / "after", ready)


# What callers do with futures and errors.


def cancel_futures(rank: int, at: Path, ready: Path) -> None:
    """Cancels each future through asyncio and directly. What was not cancelled is saved. Then all calls still work."""
    for call in CALLS:
        place = Place(at / f"cancelled-{call}", ready)
        try:
            future = call.begin(place)
        finally:
            say(f"began {call}")
        if future is None:
            continue

        async def wait_a_moment(future: Future[Any] = future) -> None:
            await asyncio.wait_for(asyncio.wrap_future(future), 0.0)

        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            asyncio.run(wait_a_moment())
        future.cancel()
        if not future.cancelled():
            future.result(LIMIT_S)
            call.check(place)
        else:
            say(f"cancelled {call}")
        call.run(Place(at / f"next-{call}", ready))
    bcp.shutdown(LIMIT_S)
    run_all(at, ready)


kept: list[BaseException] = []


def keep_errors(rank: int, at: Path, ready: Path) -> None:
    """Makes each call fail and keeps the error. The same call then works where it can, and so do all calls."""
    for call in CALLS:
        if not call.may_fail:
            continue
        try:
            future = call.begin(Place(Path("/proc/nowhere"), at / "absent"))
            if future is not None:
                future.result(LIMIT_S)
        except (bcp.CheckpointError, CheckpointException) as error:
            kept.append(error)
        else:
            say(f"{call} FAILED: it did not fail")
        call.run(Place(at / f"after-error-{call}", ready))
    run_all(at, ready)


# After a fork.


def fork(rank: int, at: Path, ready: Path) -> None:
    """Makes all calls in a child that is forked while a save is under way and every lock is held.

    This process makes all calls before the fork, and again after the child and the save have ended.
    """
    run_all(at / "before", ready)
    forked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        go_on.set()
        assert forked.wait(LIMIT_S)

    save = bcp.async_save_state_dict(at / "saving", {"w": torch.full((1000,), 7.0)}, planner=Saving(hold), no_dist=True)
    assert go_on.wait(LIMIT_S)
    with contextlib.ExitStack() as stack:
        for lock in list(all_locks):
            stack.enter_context(lock)
        child = os.fork()
        if child == 0:
            signal.alarm(int(LIMIT_S))
            stack.pop_all()
            run_all(at / "child", ready)
            return  # the child runs to the end of the script, as its parent does
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    forked.set()
    save.committed.result(LIMIT_S)
    got = {"w": torch.zeros(1000)}
    bcp.load_state_dict(at / "saving", got, no_dist=True)
    assert torch.equal(got["w"], torch.full((1000,), 7.0))
    run_all(at / "after", ready)

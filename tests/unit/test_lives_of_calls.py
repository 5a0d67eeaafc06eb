# SPDX-License-Identifier: Apache-2.0
"""Tests each public call in each circumstance of the ordinary life of a job.

The circumstances are the end of the process, threads, forks, hooks, and what callers do with futures and errors. For
process groups see tests/distributed/test_calls_in_subgroups.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ending_ranks import Ended, EndingRanks
from support.public_calls import CALLS, NO_CALLS, prepare
from unit import lives

import bytecheckpoint as bcp

AT_ONCE = 4  # processes
TRIES = 5
SURELY = {"append_state", "commit", "fill", "run", "verify"}  # functions of our C++ that release the GIL
NAMES = [str(call) for call in CALLS]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ready")
    prepare(path)
    return path


# Calls that cannot work in a circumstance, in their order, and why.
AT_THE_END = ("dcp_async_save",)  # DCP's own executor takes no saves any more
STAGING = ("dcp_async_save", "registered_async_save", "async_save_state_dict", "cancel", "save_fast")
IN_A_CHILD = STAGING  # the memory for staged states is the parent's
IN_A_HOOK = {
    # They would wait for the save whose hook makes the call, or for memory that it has.
    "in_background_save": ("async_save_state_dict", "cancel", "save_fast", "shutdown"),
    "in_staging": ("shutdown",),
}


def assert_all_worked(ended: Ended, times: int = 1, refused: tuple[str, ...] = ()) -> None:
    """Asserts that all calls worked, ``times`` times each, except that those in ``refused`` were refused once."""
    assert ended.code == 0, ended.said
    assert "FAILED" not in ended.said, ended.said
    said = [line.removesuffix(" refused") for line in ended.said.splitlines()]
    assert [line for line in said if line in NAMES] == NAMES * times, ended.said
    assert [f"{name} refused" for name in refused] == [line for line in ended.said.splitlines() if "refused" in line]


def test_the_table_has_all_public_names() -> None:
    named = {name for call in CALLS for name in call.names}
    assert named | NO_CALLS.keys() == {*bcp.__all__}
    assert not named & NO_CALLS.keys()


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("moment", lives.MOMENTS)
def test_at_the_end_of_the_interpreter(
    tmp_path: Path, ready: Path, ending_ranks: EndingRanks, moment: Any, used_before: bool
) -> None:
    (ended,) = ending_ranks.run(1, lives.work_at_the_end, tmp_path, ready, moment, used_before, frees_modules=True)
    assert_all_worked(ended, 1, () if moment is lives.before_threads_end else AT_THE_END)


def test_in_a_daemon_thread_at_the_end_of_the_interpreter(
    tmp_path: Path, ready: Path, ending_ranks: EndingRanks
) -> None:
    """The thread is in each function of our C++ that releases the GIL, and in each call, when the interpreter ends."""
    places, seen = [], set()
    for trial in range(TRIES):
        (found,) = ending_ranks.run(1, lives.find_places, tmp_path / f"look_{trial}", ready, frees_modules=True)
        assert found.code == 0, found
        for call, *names in map(str.split, found.said.splitlines()):
            fresh = [name for name in names if name not in seen] or names[:1]
            places += [(call, name) for name in fresh if (call, name) not in places]
            seen.update(fresh)
        # On a busy machine a short function has the GIL back before another thread has seen that it was free.
        if seen >= SURELY:
            break
    assert seen >= SURELY, found.said
    for trial in range(TRIES):
        went_on, folder = [], tmp_path / f"try_{trial}"  # where no earlier save has died, which would be said
        folder.mkdir()
        for begin in range(0, len(places), AT_ONCE):
            some = places[begin : begin + AT_ONCE]
            ended = ending_ranks.run(len(some), lives.be_inside, folder, ready, some, begin > 0, frees_modules=True)
            # If the thread got the GIL back in time, because the main thread was asleep, the place is tried again.
            for place, one in zip(some, ended, strict=True):
                is_again = one.said.startswith("went on")
                went_on += [place] * is_again
                assert is_again or one == Ended(0, ""), place
        places = went_on
    assert not places


def test_in_a_hook_in_a_daemon_thread_at_the_end_of_the_interpreter(
    tmp_path: Path, ready: Path, ending_ranks: EndingRanks
) -> None:
    ended = ending_ranks.run(len(lives.HOOKS), lives.be_in_a_hook, tmp_path, ready, frees_modules=True)
    assert not [(hook, one) for hook, one in zip(lives.HOOKS, ended, strict=True) if one != Ended(0, "")]


@pytest.mark.parametrize("hook", lives.HOOKS)
def test_nested_twice(tmp_path: Path, ready: Path, ending_ranks: EndingRanks, hook: lives.Hook) -> None:
    (ended,) = ending_ranks.run(1, lives.nest, tmp_path, ready, hook, frees_modules=True)
    assert_all_worked(ended, 2, IN_A_HOOK.get(hook.__name__, ()))


def test_with_futures_cancelled(tmp_path: Path, ready: Path, ending_ranks: EndingRanks) -> None:
    (ended,) = ending_ranks.run(1, lives.cancel_futures, tmp_path, ready, frees_modules=True)
    assert_all_worked(ended)


def test_with_errors_kept(tmp_path: Path, ready: Path, ending_ranks: EndingRanks) -> None:
    (ended,) = ending_ranks.run(1, lives.keep_errors, tmp_path, ready, frees_modules=True)
    assert_all_worked(ended)


def test_after_a_fork(tmp_path: Path, ready: Path, ending_ranks: EndingRanks) -> None:
    (ended,) = ending_ranks.run(1, lives.fork, tmp_path, ready, frees_modules=True)
    assert_all_worked(ended, 3, IN_A_CHILD)

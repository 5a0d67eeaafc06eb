# SPDX-License-Identifier: Apache-2.0
"""``new_group`` refuses wrong arguments, leaves nothing behind, and a forked child inherits no connections."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import run_ranks

from bytecheckpoint import async_save_state_dict, load_state_dict, new_group, save_state_dict
from bytecheckpoint.dcp import _group_flow
from bytecheckpoint.distributed.groups import destroy_own_groups, monitor_of
from bytecheckpoint.errors import ConfigError, RankLostError

LIMIT_S = 30.0


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bytecheckpoint-watch"]


def make_and_destroy(path: Path) -> None:
    for bad in (0.5, timedelta(days=2), float("nan")):
        with pytest.raises(ConfigError, match="stall_timeout"):
            new_group(stall_timeout=bad)
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="not one of them"):
            new_group([0, 1])
    dist.barrier()
    assert not watching()
    if dist.get_rank() < 2:
        group = new_group([0, 1], stall_timeout=timedelta(seconds=20))
        save_state_dict(path, {"number": 1}, process_group=group)
        threads = watching()
        assert len(threads) == 1, "our entry points use a group that is watched already"
        of_watch = [link.socket.fileno() for link in monitor_of(group)._links.values()]  # type: ignore[union-attr]
        child = os.fork()
        if child == 0:
            open_still = [fd for fd in of_watch if Path(f"/proc/self/fd/{fd}").exists()]
            os._exit(len(open_still))
        assert os.waitpid(child, 0)[1] == 0, "a child would hold the connections of a parent that has died"
        got = {"number": 0}
        load_state_dict(path, got, process_group=group)
        assert_equal(got, {"number": 1})
        dist.barrier(group)
        dist.destroy_process_group(group)
        for thread in threads:
            thread.join(LIMIT_S)
        assert not watching()
        assert not [fd for fd in of_watch if Path(f"/proc/self/fd/{fd}").exists()]
    dist.barrier()


def test_a_group_leaves_nothing_behind(tmp_path: Path) -> None:
    run_ranks(3, make_and_destroy, tmp_path / "ckpt")


def give_up_once(path: Path) -> None:
    """Interrupts one rank in an exchange of DCP. The others raise an error, and then all ranks continue together."""
    save_state_dict(path, {"number": 1})
    wrapper: Any = _group_flow._GroupWrapper
    scatter = wrapper.scatter_object

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapper.scatter_object = scatter
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        wrapper.scatter_object = interrupted
        with pytest.raises(KeyboardInterrupt):
            save_state_dict(path, {"number": 2})
    else:
        with pytest.raises(RankLostError, match="rank 1 gave up"):
            save_state_dict(path, {"number": 2})
    for number in (3, 4):
        report = save_state_dict(path, {"number": number})
        got = {"number": 0}
        load_state_dict(path, got)
        assert_equal(got, {"number": number})
        assert len(report.ranks) == (dist.get_world_size() if dist.get_rank() == 0 else 0)


def test_all_go_on_after_one_gave_up(tmp_path: Path) -> None:
    run_ranks(3, give_up_once, tmp_path / "ckpt")


def destroy_again_and_again(path: Path) -> None:
    """Destroys our groups again and again, as trainers that follow one another in a process do.

    A new group must not have the name of an old one, because the store still holds what the old one wrote.
    """
    for number in range(8):
        given = dist.new_group(backend="gloo")
        save_state_dict(path, {"number": number}, process_group=given)
        async_save_state_dict(path, {"number": number + 1}, process_group=given).committed.result()
        got = {"number": 0}
        load_state_dict(path, got, process_group=given)
        assert_equal(got, {"number": number + 1})
        assert len(watching()) == 2
        destroy_own_groups(given)
        destroy_own_groups(given)
        assert not watching()


def test_groups_that_we_made_can_be_destroyed_and_made_anew(tmp_path: Path) -> None:
    run_ranks(3, destroy_again_and_again, tmp_path / "ckpt")


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def make_in_two_threads(path: Path) -> None:
    rank, c10d = dist.get_rank(), cast("Any", dist.distributed_c10d)
    if rank > 0:
        wait_for(path / f"go{rank}")
        new_group([0, rank])
    else:
        theirs, new_group_of_torch = c10d._process_group_name, dist.new_group
        both_are_in = threading.Barrier(2)

        def entered(ranks: list[int], **options: Any) -> Any:
            both_are_in.wait(LIMIT_S)
            return new_group_of_torch(ranks, **options)

        dist.new_group = entered
        with ThreadPoolExecutor(2) as threads:
            made = [threads.submit(new_group, [0, peer]) for peer in (1, 2)]
            for peer in (1, 2):
                (path / f"go{peer}").touch()
            assert [group.result(LIMIT_S).size() for group in made] == [2, 2]
        dist.new_group = new_group_of_torch
        assert c10d._process_group_name is theirs
        assert len({group.result().group_name for group in made}) == 2
    dist.barrier()


def test_groups_that_are_made_in_two_threads_at_once(tmp_path: Path) -> None:
    run_ranks(3, make_in_two_threads, tmp_path, limit_s=100)

# SPDX-License-Identifier: Apache-2.0
"""A newer commit comes during a load: our entry points and ``register()`` then load the newer one, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import failures, run_ranks

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter
from bytecheckpoint import state_dicts as state_dicts_module
from bytecheckpoint.dcp import reader as reader_module
from bytecheckpoint.dcp import repeated_loads
from bytecheckpoint.errors import CheckpointChangedError


def state(number: int) -> dict[str, Any]:
    return {"a": torch.full((1000,), number), "nested": {"number": number, "values": [number, number]}}


class Overtaken(BcpReader):
    """After each read of the metadata rank 0 commits a newer save, ``saves_left`` times."""

    saves_left = 0
    saved = 1

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        if Overtaken.saves_left > 0:
            Overtaken.saves_left -= 1
            Overtaken.saved += 1
            dist.barrier()
            if dist.get_rank() == 0:
                dcp.save(state(Overtaken.saved), storage_writer=BcpWriter(self.path), no_dist=True)
            dist.barrier()
        return metadata


def own(path: str, target: dict[str, Any]) -> None:
    report = bytecheckpoint.load_state_dict(path, target)
    assert report.path == path


def registered(path: str, target: dict[str, Any]) -> None:
    with bytecheckpoint.registered():
        dcp.load(target, checkpoint_id=path)


def own_with_a_planner(path: str, target: dict[str, Any]) -> None:
    bytecheckpoint.load_state_dict(path, target, planner=BcpLoadPlanner())


def registered_with_a_planner(path: str, target: dict[str, Any]) -> None:
    with bytecheckpoint.registered():
        dcp.load(target, checkpoint_id=path, planner=BcpLoadPlanner())


def registered_with_a_reader(path: str, target: dict[str, Any]) -> None:
    with bytecheckpoint.registered():
        dcp.load(target, storage_reader=Overtaken(path))


LOADS = (own, registered)
LOADS_AS_ASKED = (own_with_a_planner, registered_with_a_planner, registered_with_a_reader)


def overtaken(load: Callable[..., None], path: str, saves: int, target: dict[str, Any]) -> None:
    # Our entry points and register() look the reader up in these modules.
    state_dicts_module.BcpReader = Overtaken  # type: ignore[misc]
    reader_module.BcpReader = Overtaken  # type: ignore[misc]
    Overtaken.saves_left = saves
    load(path, target)


def begins_again(load: Callable[..., None], path: str) -> None:
    target = state(0)
    overtaken(load, path, 2, target)
    assert (Overtaken.saves_left, Overtaken.saved) == (0, 3)
    assert_equal(target, state(3))


def changed(load: Callable[..., None], path: str) -> None:
    try:
        found = failures(partial(overtaken, load, path, 1, state(0)))
    except CheckpointChangedError as error:  # our own entry points raise it as it is
        found = dict.fromkeys(range(dist.get_world_size()), error)
    assert {rank: type(error) for rank, error in found.items()} == dict.fromkeys((0, 1), CheckpointChangedError)


def overtaken_for_ever(path: str) -> None:
    repeated_loads._MAX_ATTEMPTS = 3
    with pytest.raises(CheckpointChangedError):
        overtaken(own, path, 100, state(0))
    assert Overtaken.saves_left == 97


@pytest.fixture
def path(tmp_path: Path) -> str:
    dcp.save(state(1), storage_writer=BcpWriter(tmp_path / "ckpt"))
    return str(tmp_path / "ckpt")


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_begins_again(load: Callable[..., None], path: str) -> None:
    run_ranks(2, begins_again, load, path)


@pytest.mark.parametrize("load", LOADS_AS_ASKED, ids=lambda load: load.__name__)
def test_what_the_call_names_is_used_as_it_is(load: Callable[..., None], path: str) -> None:
    run_ranks(2, changed, load, path)


def test_not_for_ever(path: str) -> None:
    run_ranks(2, overtaken_for_ever, path)

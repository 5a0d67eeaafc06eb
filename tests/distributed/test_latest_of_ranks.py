# SPDX-License-Identifier: Apache-2.0
"""With a process group one rank looks for the newest checkpoint, and all resume from the same."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.late import late
from support.ranks import run_ranks
from torch import nn

import bytecheckpoint
from bytecheckpoint import find_latest_ckpt_path, latest, save_state_dict
from bytecheckpoint.errors import CheckpointError


def save_step(run: Path, step: int) -> None:
    save_state_dict(run / f"step-{step}", {"weight": torch.ones(4) * step}, no_dist=True)


def found_by(look: Callable[..., str | None], run: Path, **options: Any) -> tuple[str | None, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = look(run, process_group=dist.group.WORLD, **options)
    return path, [str(warning.message) for warning in caught if Path(warning.filename) == Path(__file__)]


def look_in_own_views(views: tuple[Path, Path]) -> None:
    """Each rank is on a machine of its own, and rank 1 sees new folders late, however it asks."""
    rank = dist.get_rank()
    run = views[rank] / "run"
    assert found_by(latest, run) == (None, [])
    for step in (1, 2):
        if rank == 0:
            save_step(run, step)
        dist.barrier()
        assert latest(run) == (str(run / f"step-{step}") if rank == 0 else None if step == 1 else str(run / "step-1"))
        assert found_by(latest, run) == (str(run / f"step-{step}"), [])
    # The lowest rank says what it passes over.
    if rank == 0:
        (run / "step-7").mkdir()
        (run / "step-7" / ".metadata").write_bytes(b"damaged")
    path, said = found_by(latest, run)
    assert (path, len(said)) == (str(run / "step-2"), 0 if rank else 1)


def test_all_get_what_the_lowest_rank_sees(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run_ranks(2, look_in_own_views, late("of=a", "blind=step-1,step-2:40")(stack, tmp_path))


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return ""


def look_and_fail(directory: Path) -> list[str]:
    rank = dist.get_rank()
    run = directory / f"view-{rank}"
    if rank == 0:
        save_step(run, 2)
        (directory / "damaged" / "step-1").mkdir(parents=True)
        (directory / "damaged" / "step-1" / ".metadata").write_bytes(b"damaged")
    dist.barrier()
    group = dist.group.WORLD
    return [
        raised(lambda: latest(run, process_group=group)),
        raised(lambda: latest(directory / "damaged", process_group=group)),
        raised(lambda: latest("" if rank else run, process_group=group)),
        raised(lambda: latest(run, "actor" if rank else "", process_group=group)),
        raised(lambda: latest(run / "step-2", process_group=group)),
    ]


def test_what_fails_on_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, look_and_fail, tmp_path)
    for on_first, on_second, wanted in zip(
        first,
        second,
        [
            "StorageError: .*the lowest rank has found step-2, and rank 1 on .* does not see that folder",
            "CheckpointError: .*none is whole: step-1 is unknown",
            "ConfigError: .*must be the path of a directory",
            "ConfigError: .*role is '' on rank 0, and 'actor' on rank 1",
            "ConfigError: .*this folder is a checkpoint itself",
        ],
        strict=True,
    ):
        for got in (on_first, on_second):
            assert re.match(wanted, got, re.DOTALL), got


def look_for_parts(directory: Path) -> None:
    model = {"model": nn.Linear(2, 2)}
    bytecheckpoint.save(directory, model, "ddp", global_steps=3).committed.result(60.0)
    path, said = found_by(find_latest_ckpt_path, directory)
    assert (path, said) == (str(directory / "global_step_3"), [])
    bytecheckpoint.load(path, model, "ddp")


def test_the_tracker_is_read_by_one_rank(tmp_path: Path) -> None:
    run_ranks(2, look_for_parts, tmp_path)


def test_without_a_default_group_it_is_local(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    assert dist.group.WORLD is None
    assert latest(tmp_path, process_group=dist.group.WORLD) == str(tmp_path / "step-1")
    assert find_latest_ckpt_path(tmp_path / "new", process_group=dist.group.WORLD) is None

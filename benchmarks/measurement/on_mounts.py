# SPDX-License-Identifier: Apache-2.0
"""Times saves and loads below a mounted folder: our classes, stock DCP, and the mount itself, in turn."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import sys
import time
import warnings
from pathlib import Path

from measurement.conditions import drop_page_cache
from measurement.contenders import BASELINE, OUR_PLANNERS, Contender, make_contenders
from measurement.results import ACTIONS
from measurement.states import State, make_state

__all__ = ["MOUNT", "Seconds", "measure"]

MOUNT = "mount"
_PIECE_BYTES = 8 << 20

Seconds = dict[str, dict[str, list[float]]]
"""By contender and action."""


def _write_one_file(state: State, path: Path) -> None:
    path.mkdir()
    with mmap.mmap(-1, _PIECE_BYTES) as piece, (path / "raw").open("wb", buffering=0) as file:
        piece.write(random.Random(0).randbytes(_PIECE_BYTES))
        left = state.num_bytes
        while left > 0:
            with memoryview(piece)[: min(left, _PIECE_BYTES)] as part:
                left -= file.write(part)
        os.fsync(file.fileno())


def _read_one_file(state: State, path: Path) -> None:
    with mmap.mmap(-1, _PIECE_BYTES) as piece, (path / "raw").open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def measure(folder: Path, sizes: dict[str, float], repetitions: int, name: str) -> dict[str, Seconds]:
    """Returns the seconds of all counted calls, by kind of state; the first round is not counted.

    Args:
        sizes: Gigabytes, by kind of state.
        name: What stderr calls the mount.
    """
    warnings.filterwarnings("ignore")
    contenders = make_contenders([OUR_PLANNERS, BASELINE])
    contenders[MOUNT] = Contender(MOUNT, _write_one_file, _read_one_file, holds_state=False)
    found: dict[str, Seconds] = {}
    for kind, gigabytes in sizes.items():
        state = make_state(kind, gigabytes)
        found[kind] = {each: {action: [] for action in ACTIONS} for each in contenders}
        for repetition in range(repetitions + 1):
            print(f"{name}, {state.description}: round {repetition} of {repetitions}", file=sys.stderr, flush=True)
            for each in random.Random(repetition).sample(list(contenders), len(contenders)):
                taken = _save_and_load(state, contenders[each], folder / "checkpoint")
                for action, seconds in zip(ACTIONS, taken, strict=True):
                    found[kind][each][action] += [seconds] if repetition else []
    return found


def _save_and_load(state: State, contender: Contender, path: Path) -> tuple[float, float]:
    begin = time.perf_counter()
    contender.save(state, path)
    save_s = time.perf_counter() - begin
    drop_page_cache(path)
    if contender.holds_state:
        state.blank()
    begin = time.perf_counter()
    contender.load(state, path)
    load_s = time.perf_counter() - begin
    if contender.holds_state:
        state.check()
    shutil.rmtree(path)
    return save_s, load_s

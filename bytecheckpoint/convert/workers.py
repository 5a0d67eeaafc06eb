# SPDX-License-Identifier: Apache-2.0
"""The pieces of a conversion, written by this process or by several."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bytecheckpoint.contents.damaged_keys import naming_keys
from bytecheckpoint.convert.source import Source
from bytecheckpoint.convert.target import TargetPiece

__all__ = ["run_pieces"]

_LOOK_S = 0.1


def run_pieces(
    source: Source,
    pieces: Sequence[TargetPiece],
    folder: Path,
    workers: int,
    *,
    verify: bool,
    progress: Callable[[int], object] | None,
) -> None:
    """Writes all pieces. The first failure ends all of it.

    Args:
        source: What to read.
        pieces: What to write.
        folder: Where to write it.
        workers: Number of processes; 1 writes in this one.
        verify: Whether to read back each piece.
        progress: Called with the bytes that were written so far.
    """
    if workers == 1 or len(pieces) <= 1:
        _write_here(source, pieces, folder, verify, progress)
        return
    context = multiprocessing.get_context("spawn")
    written, stops = context.SimpleQueue(), context.Event()
    total = 0

    def tell() -> None:
        nonlocal total
        while not written.empty():
            total += written.get()
        if progress is not None:
            progress(total)

    try:
        with concurrent.futures.ProcessPoolExecutor(
            min(workers, len(pieces)), context, _begin, (source, folder, verify, written, stops)
        ) as pool:
            try:
                waiting = {pool.submit(_work, piece) for piece in pieces}
                while waiting:
                    finished, waiting = concurrent.futures.wait(waiting, _LOOK_S, concurrent.futures.FIRST_COMPLETED)
                    tell()
                    for one in finished:
                        one.result()
            except BaseException:
                stops.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        tell()
    finally:
        written.close()


def _write_here(
    source: Source, pieces: Sequence[TargetPiece], folder: Path, verify: bool, progress: Callable[[int], object] | None
) -> None:
    opened = source.open()
    before = 0

    def tell(now: int) -> None:
        if progress is not None:
            progress(before + now)

    for piece in pieces:
        with naming_keys(opened.stored):
            piece.write(source, opened, folder, verify, tell)
        before += piece.num_bytes


class _Stopped(Exception):
    """Another worker has failed."""


_own: dict[str, Any] = {}  # what this worker was told by `_begin`, and what it has opened


def _begin(source: Source, folder: Path, verify: bool, written: Any, stops: Any) -> None:
    _own.update(source=source, folder=folder, verify=verify, written=written, stops=stops)


def _work(piece: TargetPiece) -> None:
    if "opened" not in _own:  # not in `_begin`, whose failure the pool would tell as an end of the process
        _own["opened"] = _own["source"].open()
    before = 0

    def tell(now: int) -> None:
        nonlocal before
        _own["written"].put(now - before)
        before = now
        if _own["stops"].is_set():
            raise _Stopped

    with naming_keys(_own["opened"].stored):
        piece.write(_own["source"], _own["opened"], _own["folder"], _own["verify"], tell)

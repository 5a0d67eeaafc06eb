# SPDX-License-Identifier: Apache-2.0
"""The files of a conversion, written by this process or by several."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint import _core
from bytecheckpoint.checkpoint.wrong_path import explaining
from bytecheckpoint.config import Config
from bytecheckpoint.convert.layout import OutputFile
from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.load_spec.view import view_of
from bytecheckpoint.object_store.stores import use_store
from bytecheckpoint.object_store.urls import is_store_url

__all__ = ["FileJob", "run_jobs"]

# With the ring that is read into, all memory of a worker beside its interpreter's.
_WRITE_RING_BYTES = 32 << 20
_LOOK_S = 0.1


@dataclass(frozen=True)
class FileJob:
    """What every worker needs to know.

    Attributes:
        source: Path or URL of the source.
        spec: What to take of it; None takes it as it is.
        config: Settings.
    """

    source: str
    spec: LoadSpec | None
    config: Config

    def checkpoint(self) -> _core.Checkpoint:
        """Opens the source."""
        if is_store_url(self.source):
            use_store(self.source, self.config, _core)
        with explaining(self.source):
            checkpoint = _core.Checkpoint.open(
                self.source,
                accept_rewritten=self.config.accept_rewritten_metadata,
                io_timeout_s=self.config.io_timeout_s,
            )
        if self.spec is not None:
            checkpoint, _ = view_of(checkpoint, self.spec, _core)
        return checkpoint

    def write(
        self, checkpoint: _core.Checkpoint, file: OutputFile, folder: Path, verify: bool, tell: Callable[[int], object]
    ) -> None:
        """Writes one file; it gets its name when it is whole and on disk.

        Raises:
            CheckpointError: It could not be read or written.
            CorruptCheckpointError: What was read back is not what was written.
        """
        part = folder / f"{file.name}.part"
        part.unlink(missing_ok=True)
        try:
            _, crc = _core.export_file(
                checkpoint,
                directory=self.source,
                path=str(part),
                head=file.head,
                tensors=file.placed(),
                file_bytes=file.num_bytes,
                direct_io=self.config.direct_io,
                verify=self.config.verify,
                num_io_threads=self.config.io_threads,
                ring_bytes=_WRITE_RING_BYTES,
                io_timeout_s=self.config.io_timeout_s,
                convert=_converted,
                progress=tell,
            )
            if verify:
                found = _core.checksum_of_file(str(folder), part.name, None)
                if found != crc:
                    raise CorruptCheckpointError(
                        f"convert({folder / file.name}): written with CRC {crc}, read back with {found}", str(part)
                    )
            part.rename(folder / file.name)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def _converted(stored: str, elements: memoryview, dtype: str, converted: memoryview) -> None:
    import torch

    source = torch.frombuffer(elements, dtype=getattr(torch, stored))
    torch.frombuffer(converted, dtype=getattr(torch, dtype)).copy_(source)


def run_jobs(
    job: FileJob,
    files: Sequence[OutputFile],
    folder: Path,
    workers: int,
    *,
    verify: bool,
    progress: Callable[[int], object] | None,
) -> None:
    """Writes all files. The first failure ends all of it.

    Args:
        job: What to read.
        files: What to write.
        folder: Where to write it.
        workers: Number of processes; 1 writes in this one.
        verify: Whether to read back each file.
        progress: Called with the bytes that were written so far.
    """
    if workers == 1 or len(files) <= 1:
        _write_here(job, files, folder, verify, progress)
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
            min(workers, len(files)), context, _begin, (job, folder, verify, written, stops)
        ) as pool:
            try:
                waiting = {pool.submit(_work, file) for file in files}
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
    job: FileJob, files: Sequence[OutputFile], folder: Path, verify: bool, progress: Callable[[int], object] | None
) -> None:
    checkpoint = job.checkpoint()
    before = 0

    def tell(now: int) -> None:
        if progress is not None:
            progress(before + now)

    for file in files:
        job.write(checkpoint, file, folder, verify, tell)
        before += file.num_bytes


class _Stopped(Exception):
    """Another worker has failed."""


_own: dict[str, Any] = {}  # what `_begin` has opened in this worker


def _begin(job: FileJob, folder: Path, verify: bool, written: Any, stops: Any) -> None:
    _own.update(job=job, folder=folder, verify=verify, written=written, stops=stops, checkpoint=job.checkpoint())


def _work(file: OutputFile) -> None:
    before = 0

    def tell(now: int) -> None:
        nonlocal before
        _own["written"].put(now - before)
        before = now
        if _own["stops"].is_set():
            raise _Stopped

    _own["job"].write(_own["checkpoint"], file, _own["folder"], _own["verify"], tell)

# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint of any source to safetensors."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bytecheckpoint import _core
from bytecheckpoint.checkpoint.local_path import local_path, location_to_read
from bytecheckpoint.checkpoint.small_files import made_folder
from bytecheckpoint.config import Config
from bytecheckpoint.convert.layout import INDEX, OutputFile, OutputTensor, index_of, lay_out
from bytecheckpoint.convert.workers import FileJob, run_jobs
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    StorageError,
    UnsupportedError,
)
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.object_store.urls import is_store_url
from bytecheckpoint.report import size_text

__all__ = ["ConvertReport", "convert"]

# Only these are converted by `dtype`: 8-bit floats have scales that belong to them.
_FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_PLAN = "conversion.json"


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """What a conversion did, or would do.

    Attributes:
        source: What was read.
        target: Folder that was written.
        num_tensors: Number of tensors.
        num_files: Number of files of tensors.
        num_bytes: Bytes of these files.
        num_cast: Number of tensors whose dtype was changed.
        num_resumed: Number of files that an earlier, interrupted conversion had finished.
        is_verified: Whether all files were read back and compared.
        seconds: Seconds that it took.
    """

    source: str
    target: str
    num_tensors: int
    num_files: int
    num_bytes: int
    num_cast: int = 0
    num_resumed: int = 0
    is_verified: bool = False
    seconds: float = 0.0

    def summary(self) -> str:
        """Returns one line for people."""
        rate = f" in {self.seconds:.2f} s" if self.seconds else ""
        notes = [f"{self.num_cast} cast"] * bool(self.num_cast) + [f"{self.num_resumed} files resumed"] * bool(
            self.num_resumed
        )
        notes += ["verified"] * self.is_verified
        files = f"{self.num_files} file{'s' if self.num_files > 1 else ''}"
        tensors = f"{self.num_tensors:,} tensor{'s' if self.num_tensors > 1 else ''}"
        return (
            f"{self.target}: {tensors}, {size_text(self.num_bytes)} in {files}{rate}"
            f"{' (' + '; '.join(notes) + ')' if notes else ''}"
        )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    spec: LoadSpec | None = None,
    dtype: str | None = None,
    shard_size: int | str = "5GB",
    workers: int = 1,
    resume: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    config: Config | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Converts a checkpoint to safetensors, as Hugging Face's ``from_pretrained`` reads them.

    Local. Memory does not grow with the checkpoint, nor with its largest tensor: each file is streamed from the boxes
    of the source. The target appears whole or not at all: files are written into a folder beside it, which gets its
    name at the end. Nothing is changed in place.

    Args:
        source: A checkpoint of ours or of stock DCP, or safetensors; a path, or the URL of a store.
        target: Folder to make. It must not exist, or be empty.
        spec: What to take of the source, under which names, in which form. Its ``strict`` and ``cast`` have no effect.
        dtype: Dtype to which floating-point tensors are converted: ``float32``, ``bfloat16``, ``float16`` or
            ``float64``. Floats of 8 bits and integers stay as they are.
        shard_size: Most bytes of one file, as a number or a text like ``5GB``. A larger tensor gets a file of its own.
        workers: Number of processes that write files at the same time.
        resume: Whether to go on with a conversion to this target that was interrupted.
        verify: Whether to read back what was written, past the page cache, and compare it.
        dry_run: Whether to look only at what would be done.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Called with the bytes that were written, and all bytes.

    Raises:
        CheckpointError: The source cannot be read; see ``BcpReader``.
        CheckpointExistsError: There is something at ``target``.
        CheckpointBusyError: Another process converts to this target.
        ConfigError: Arguments do not fit the source: a pattern matches nothing, a value is an object.
        StorageError: There is no room, or the file system refused.
        UnsupportedError: Safetensors cannot hold a tensor.
    """
    begin = time.monotonic()
    config = config or Config.from_env()
    place, folder = location_to_read(source), local_path(target)
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    job = FileJob(str(place), spec, config)
    checkpoint = job.checkpoint()
    tensors, casts = _tensors_of(checkpoint, dtype)
    files = lay_out(tensors, parsed_size(shard_size))
    report = ConvertReport(
        source=str(place),
        target=str(folder),
        num_tensors=len(tensors),
        num_files=len(files),
        num_bytes=_bytes_of(files),
        num_cast=casts,
    )
    _refuse_existing(folder)
    if dry_run:
        return report
    with _staging_folder(folder, resume, _plan_of(checkpoint, str(place), files)) as staging:
        left = [file for file in files if not (staging / file.name).is_file()]
        _check_room(staging, _bytes_of(left))
        done = report.num_bytes - _bytes_of(left)
        tell = (lambda now: progress(done + now, report.num_bytes)) if progress else None
        run_jobs(job, left, staging, workers, verify=verify, progress=tell)
        _publish(staging, folder, files)
    return dataclasses.replace(
        report, num_resumed=len(files) - len(left), is_verified=verify, seconds=time.monotonic() - begin
    )


def parsed_size(size: int | str) -> int:
    """Returns a number of bytes, which may be given as a text like ``5GB``.

    Raises:
        ConfigError: It is no size, or not above 0.
    """
    if isinstance(size, int):
        number = float(size)
    else:
        text = size.strip().upper()
        unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
        try:
            number = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
        except ValueError:
            number = 0
    if not number >= 1:
        raise ConfigError(f"size {size!r}: must be a number of bytes above 0, such as 5GB or 512MiB")
    return int(number)


def _tensors_of(checkpoint: _core.Checkpoint, dtype: str | None) -> tuple[list[OutputTensor], int]:
    """Returns what to write, and how many tensors get another dtype."""
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(f"dtype {dtype!r}: must be one of {', '.join(_FLOATS)}")
    tensors, objects, opaque, casts = [], [], [], 0
    for name, stored, shape, itemsize, *_ in checkpoint.contents():
        if stored is None:
            objects.append(name)
        elif not itemsize:
            opaque.append(f"'{name}' is {stored}")
        else:
            if dtype is not None and stored in _FLOATS and stored != dtype:
                stored, itemsize, casts = dtype, _FLOATS[dtype], casts + 1
            tensors.append(OutputTensor(name, stored, tuple(shape), math.prod(shape) * itemsize, itemsize))
    if objects:
        raise ConfigError(
            f"safetensors hold tensors alone; these are objects: {listed([*map(repr, objects)])}; "
            "leave them out with exclude, or choose with include"
        )
    if opaque:
        raise UnsupportedError(f"safetensors cannot hold quantized tensors: {listed(opaque)}")
    return tensors, casts


def _plan_of(checkpoint: _core.Checkpoint, source: str, files: Sequence[OutputFile]) -> str:
    """Returns a digest of what is converted: a conversion goes on only with what it began with."""
    digest = hashlib.sha256(json.dumps([source, checkpoint.save_id]).encode())
    for file in files:
        digest.update(file.name.encode() + file.head)
    if checkpoint.foreign is not None and not is_store_url(source):
        for name, *_ in checkpoint.files():
            path = Path(checkpoint.data_directory(source)) / name
            found = path.stat()
            digest.update(f"{name} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()


def _refuse_existing(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise CheckpointExistsError(f"convert({target}): it exists, and nothing is changed in place", str(target))


@contextmanager
def _staging_folder(target: Path, resume: bool, plan: str) -> Iterator[Path]:
    """Makes the folder beside ``target`` in which files are written, and holds its lock."""
    staging = target.parent / f".{target.name}.converting"
    note = staging / _PLAN
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(exist_ok=True)
        with note.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointBusyError(
                    f"convert({target}): another process converts to this target", str(target)
                ) from None
            file.seek(0)
            before = file.read()
            if before and not resume:
                raise CheckpointExistsError(
                    f"convert({target}): an earlier conversion was interrupted: go on with resume (--resume), or "
                    f"remove {staging}",
                    str(staging),
                )
            if before != plan and (before or any(staging.glob("*.safetensors"))):
                raise ConfigError(
                    f"convert({target}): the interrupted conversion had another source or other arguments: remove "
                    f"{staging} to begin anew"
                )
            if not before:
                file.write(plan)
                file.flush()
                os.fsync(file.fileno())
            yield staging
    except CheckpointError:
        raise  # some are OSErrors, too
    except OSError as error:
        raise StorageError(f"convert({target}): {error}", str(target), error.errno or 0) from error


def _bytes_of(files: Sequence[OutputFile]) -> int:
    return sum(file.num_bytes for file in files)


def _check_room(staging: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(staging).free
    if num_bytes > free:
        raise StorageError(
            f"convert({staging}): {size_text(num_bytes)} needed, but only {size_text(free)} are free", str(staging), 28
        )


def _publish(staging: Path, target: Path, files: Sequence[OutputFile]) -> None:
    """Gives the finished folder its name. The index, without which several files are no model, comes last."""
    if len(files) > 1:
        part = staging / f"{INDEX}.part"
        with part.open("wb") as file:
            file.write(index_of(files))
            file.flush()
            os.fsync(file.fileno())
        part.rename(staging / INDEX)
    made_folder(staging).sync()
    staging.rename(target)
    # Only now: files without the note of what they are would be taken for those of any later conversion.
    (target / _PLAN).unlink()
    made_folder(target).sync()
    made_folder(target.parent).sync()

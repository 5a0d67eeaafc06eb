# SPDX-License-Identifier: Apache-2.0
"""Digests of what a checkpoint holds, whatever its shards, files and format. Needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bytecheckpoint.checkpoint.canonical import canonical_record
from bytecheckpoint.config import Config
from bytecheckpoint.contents.damaged_keys import naming_keys
from bytecheckpoint.contents.opening import open_checkpoint
from bytecheckpoint.contents.wrong_path import explaining
from bytecheckpoint.errors import InvalidPlanError, UnsupportedError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.in_use import reading
from bytecheckpoint.storage.parts import json_of
from bytecheckpoint.storage.paths import location_to_read
from bytecheckpoint.storage.stored_digest import stored_in

if TYPE_CHECKING:
    from bytecheckpoint.native import _C

__all__ = ["Digest", "combined", "digest", "digest_of"]

# Elements are hashed in blocks of so many bytes, so that several threads can hash one tensor.
_BLOCK_BYTES = 1 << 20
# What is read at once, into one of two buffers: one is filled while the other is hashed.
_BUFFER_BYTES = 16 * _BLOCK_BYTES
_ALIGNMENT = 64
_MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Digests of a checkpoint, as hex digits of SHA-256. docs/internals/digest_form.md says how to compute them.

    Attributes:
        path: What was read.
        total: Digest of all names and values.
        keys: Digest of the value of each key, in the order of the names' UTF-8 bytes. It does not depend on the name.
        as_stored: Names of the objects that are not of builtin types. Their digests are those of the stored bytes, so
            they may differ for equal objects that other versions of Python or torch have pickled.
        stored: The total that the save stored, with ``digest=True``; None if it stored none, or a spec was passed.
        differing: Names of the keys whose digests differ from those that the save stored.
        num_bytes: Bytes of tensors and objects.
        seconds: Seconds that it took.
    """

    path: str
    total: str
    keys: Mapping[str, str] = field(repr=False)
    as_stored: tuple[str, ...] = ()
    stored: str | None = None
    differing: tuple[str, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def is_as_saved(self) -> bool:
        """Whether the digests are those that the save stored, if it stored any."""
        return self.stored in (None, self.total) and not self.differing


def digest(
    path: str | os.PathLike[str] | None,
    *,
    spec: LoadSpec | None = None,
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Digest:
    """Computes digests of what a checkpoint holds: names, dtypes, shapes and elements of tensors, and objects.

    They do not depend on how tensors are sharded, on the layout of files, or on the format. Two checkpoints with equal
    digests load the same bits. Local; memory use is bounded.

    Args:
        path: A checkpoint of ours or of stock DCP, or safetensors; a path, or the URL of a store.
        spec: What to take of it, under which names, in which form. Its ``strict`` and ``cast`` have no effect.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Called with the bytes done, and all bytes.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CorruptCheckpointError: What was read is damaged.
        UnsupportedError: Some elements of a tensor are not stored, or they are not stored as plain elements. The
            message names the key.
        StorageError: The storage refused, or did not answer.
    """
    config = config or Config.from_env()
    directory = str(location_to_read(path))
    folder = folder_at(directory)
    folder.use(config)
    config = folder.tuned(config)
    with explaining(directory), reading(directory):
        opened = open_checkpoint(directory, config, kind=_core.Checkpoint, spec=spec, is_known=True, explain=False)
        return digest_of(opened.wanted, directory, config=config, progress=progress)


def digest_of(
    checkpoint: _core.Checkpoint | _C.Checkpoint,
    directory: str,
    *,
    rank: int | None = None,
    extension: Any = _core,
    config: Config,
    progress: Callable[[int, int], object] | None = None,
) -> Digest:
    """Computes digests of a checkpoint that is open.

    Args:
        checkpoint: The checkpoint, or a view of it.
        directory: Its directory.
        rank: Rank whose part it is, if it was saved without collectives.
        extension: The extension module of ``checkpoint``: ``_C`` or ``_core``.
        config: Settings.
        progress: Called with the bytes done, and all bytes.

    Raises:
        UnsupportedError: See ``digest``.
    """
    begin = time.monotonic()
    contents = checkpoint.contents()
    tensors = [_Tensor(name, dtype, tuple(shape), itemsize) for name, dtype, shape, itemsize, *_ in contents if dtype]
    objects = [(name, num_bytes) for name, dtype, _, _, num_bytes, *_ in contents if dtype is None]
    try:
        reader = extension.RowMajorReader(
            checkpoint,
            [tensor.name for tensor in tensors],
            directory=directory,
            rank=rank,
            direct_io=config.direct_io,
            verify=config.verify,
            num_io_threads=config.load_io_threads or config.io_threads,
            ring_bytes=config.ring_bytes,
            io_timeout_s=config.io_timeout_s,
        )
    except (InvalidPlanError, UnsupportedError) as error:
        raise UnsupportedError(f"digest({directory}): {error}; it can be left out with exclude", directory) from None
    tensors = [tensor.stored_as(found) for tensor, found in zip(tensors, reader.dtypes, strict=True)]
    total = sum(tensor.num_bytes for tensor in tensors) + sum(num_bytes for _, num_bytes in objects)
    done = 0

    def tell(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    tell(0)
    with naming_keys(checkpoint):
        digests = dict(_of_tensors(reader, tensors, tell))
        as_stored = []
        for name, value, is_canonical in _of_objects(reader, objects, tell):
            digests[name] = value
            if not is_canonical:
                as_stored.append(name)
    digests = {name: digests[name] for name in sorted(digests, key=_encoded)}
    keys = {name: value.hex() for name, value in digests.items()}
    stored, of_keys = _stored_in(checkpoint, directory) or (None, keys)
    return Digest(
        path=directory,
        total=combined(digests).hex(),
        keys=keys,
        as_stored=tuple(as_stored),
        stored=stored,
        differing=tuple(name for name in keys if of_keys[name] != keys[name]),
        num_bytes=total,
        seconds=time.monotonic() - begin,
    )


def _stored_in(checkpoint: _core.Checkpoint | _C.Checkpoint, directory: str) -> tuple[str, dict[str, str]] | None:
    """Returns what the save stored: the total, and the digest of each key. None for a view, and of other writers."""
    if checkpoint.is_view or checkpoint.foreign is not None:
        return None
    return stored_in(json_of(checkpoint.user_metadata, directory), checkpoint.names(), directory)


def combined(digests: Mapping[str, bytes]) -> bytes:
    """Returns one digest of several values by name."""
    total = hashlib.sha256(b"keys\n")
    for name in sorted(digests, key=_encoded):
        total.update(hashlib.sha256(_encoded(name)).digest() + digests[name])
    return total.digest()


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @cached_property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def head(self) -> bytes:
        return f"tensor {self.dtype} {list(self.shape)}\n".encode()

    def stored_as(self, found: tuple[str, int] | None) -> _Tensor:
        """Returns the tensor with the dtype that its elements have on disk, which a planner may have changed."""
        if found in (None, (self.dtype, self.itemsize)):
            return self
        return dataclasses.replace(self, dtype=found[0], itemsize=found[1])


@dataclass(frozen=True)
class _Piece:
    """Bytes [begin, end) of a tensor, and where in a buffer they come to lie. ``begin`` is a multiple of a block."""

    tensor: int
    begin: int
    end: int
    offset: int


def _runs(tensors: Sequence[_Tensor]) -> Iterator[list[_Piece]]:
    """Yields what fits into a buffer, again and again."""
    run: list[_Piece] = []
    filled = 0
    for number, tensor in enumerate(tensors):
        begin = 0
        while begin < tensor.num_bytes:
            left = tensor.num_bytes - begin
            room = _BUFFER_BYTES - filled
            size = left if left <= room else room - room % _BLOCK_BYTES
            if size == 0:
                yield run
                run, filled = [], 0
                continue
            run.append(_Piece(number, begin, begin + size, filled))
            begin += size
            filled += size + -size % _ALIGNMENT
            if filled >= _BUFFER_BYTES:
                yield run
                run, filled = [], 0
    if run:
        yield run


_Hashed = list[tuple[int, bytes]]  # blocks of tensors, in order


def _hashes(buffer: memoryview, blocks: list[tuple[int, int, int]]) -> _Hashed:
    return [(tensor, hashlib.sha256(buffer[begin:end]).digest()) for tensor, begin, end in blocks]


def _jobs(run: Sequence[_Piece]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields blocks of a run, about a block's bytes at a time: tensor, begin and end in the buffer."""
    job: list[tuple[int, int, int]] = []
    num_bytes = 0
    for piece in run:
        for begin in range(piece.begin, piece.end, _BLOCK_BYTES):
            at = piece.offset + begin - piece.begin
            size = min(_BLOCK_BYTES, piece.end - begin)
            job.append((piece.tensor, at, at + size))
            num_bytes += size
            if num_bytes >= _BLOCK_BYTES:
                yield job
                job, num_bytes = [], 0
    if job:
        yield job


def _of_tensors(reader: Any, tensors: Sequence[_Tensor], tell: Callable[[int], None]) -> Iterator[tuple[str, bytes]]:
    digests = [hashlib.sha256(tensor.head) for tensor in tensors]
    size = min(_BUFFER_BYTES, sum(tensor.num_bytes + _ALIGNMENT for tensor in tensors))
    buffers = [memoryview(bytearray(size)) for _ in range(2)]
    waiting: deque[list[Future[_Hashed]]] = deque()

    def finish_run() -> None:
        for job in waiting.popleft():
            for tensor, of_block in job.result():
                digests[tensor].update(of_block)

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "bcp-digest") as pool:
        for run in _runs(tensors):
            if len(waiting) == len(buffers):
                finish_run()
            buffer = buffers[0]
            buffers.reverse()
            itemsizes = [tensors[each.tensor].itemsize for each in run]
            ranges = [
                (each.tensor, each.begin // itemsize, each.end // itemsize, each.offset)
                for each, itemsize in zip(run, itemsizes, strict=True)
            ]
            reader.read(ranges, buffer)
            waiting.append([_begun(pool, buffer, job) for job in _jobs(run)])
            tell(sum(each.end - each.begin for each in run))
        while waiting:
            finish_run()
    for tensor, of_tensor in zip(tensors, digests, strict=True):
        yield tensor.name, of_tensor.digest()


def _begun(pool: ThreadPoolExecutor, buffer: Any, job: Any) -> Future[Any]:
    try:
        return pool.submit(_hashes, buffer, job)
    except RuntimeError:  # the interpreter is ending, and starts no threads any more
        here: Future[Any] = Future()
        here.set_result(_hashes(buffer, job))
        return here


def _of_objects(
    reader: Any, objects: Sequence[tuple[str, int]], tell: Callable[[int], None]
) -> Iterator[tuple[str, bytes, bool]]:
    """Yields each object's name, its digest, and whether it is that of the canonical form."""
    begin = 0
    while begin < len(objects):
        end, num_bytes = begin, 0
        while end < len(objects) and (end == begin or num_bytes + objects[end][1] <= _BUFFER_BYTES):
            num_bytes += objects[end][1]
            end += 1
        names = [name for name, _ in objects[begin:end]]
        for name, record in zip(names, reader.read_objects(names), strict=True):
            form, is_canonical = canonical_record(name, record)
            head = b"object\n" if is_canonical else b"stored\n"
            yield name, hashlib.sha256(head + form).digest(), is_canonical
        tell(num_bytes)
        begin = end

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ours, and of stock DCP, as targets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bytecheckpoint.checkpoint.verification import verify as verify_checkpoint
from bytecheckpoint.convert.file_piece import note_checksums
from bytecheckpoint.convert.nesting import paths_of, refuse_clashes
from bytecheckpoint.convert.outputs import Outputs, OutputTensor
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.small_files import write_small_file

__all__ = ["DcpTarget", "Share"]

_METADATA = ".metadata"


@dataclass(frozen=True)
class Share:
    """A data file of the target, and what is in it.

    Attributes:
        number: Number of the share; the rank in the name of the file.
        is_plain: Whether the file is one of stock DCP, without our checksums.
        tensors: For each chunk: name and dtype of the tensor, its first row, its rows.
        as_is: Names of objects and of tensors that are not plain.
        num_bytes: Bytes of all these.
        url: Where the file goes, if it is an object of a store.
    """

    number: int
    is_plain: bool
    tensors: tuple[tuple[str, str, int, int], ...]
    as_is: tuple[str, ...]
    num_bytes: int
    url: str | None = None

    @property
    def name(self) -> str:
        """See ``TargetPiece``."""
        return f"share-{self.number}.written"

    @property
    def is_verified_alone(self) -> bool:
        """See ``TargetPiece``."""
        return False

    def is_done(self, folder: Path) -> bool:
        """See ``TargetPiece``."""
        return (folder / self.name).is_file()

    def write(self, source: Source, opened: Opened, folder: Path, verify: bool, tell: Callable[[int], object]) -> None:
        """See ``TargetPiece``. What the file contains is noted in a file beside it, for ``DcpTarget.finish``."""
        options = source.options(tell)
        if self.url is not None:
            place = folder_at(self.url)
            place.use(source.config)
            tuned = place.tuned(source.config)
            options.update(num_io_threads=tuned.io_threads, ring_bytes=tuned.ring_bytes)
        written = _core.copy_shard(
            opened.wanted,
            target=self.url or str(folder),
            rank=self.number,
            plain=self.is_plain,
            shard=(self.tensors, self.as_is),
            num_bytes=self.num_bytes,
            **options,
        )
        note_checksums(folder / self.name, opened)
        write_small_file(folder / self.name, written, sync_folder=False)


class DcpTarget:
    """A checkpoint in a directory, or below the URL of a store.

    Args:
        outputs: What is written.
        most_bytes: The most bytes in a data file. A larger tensor is cut along its first dim.
        is_plain: Whether it is one of stock DCP, without our manifest and checksums.
        url: The URL; None for a directory.
    """

    is_file = False

    def __init__(self, outputs: Outputs, most_bytes: int, is_plain: bool, url: str | None = None) -> None:
        if url is not None:
            most_bytes = min(most_bytes, folder_at(url).most_file_bytes // 2)
        self._is_plain = is_plain
        self._names = [each.name for each in outputs.tensors] + [*outputs.opaque, *outputs.objects]
        self.pieces = [replace(share, url=url) for share in _shares(outputs, most_bytes, is_plain)]

    def check(self, opened: Opened) -> None:
        """See ``Target``. DCP would find out when it loads all without a state dict."""
        refuse_clashes(paths_of(opened, self._names))

    def identity(self) -> bytes:
        """See ``Target``."""
        return json.dumps([[share.is_plain, share.tensors, share.as_is] for share in self.pieces]).encode()

    def assembled(self, opened: Opened, folder: Path, target: str) -> _core.Checkpoint:
        """Returns the checkpoint that all shares make together.

        Args:
            opened: What was converted.
            folder: Where ``Share.write`` has put its notes.
            target: The path or URL of the checkpoint.
        """
        return _core.assemble_copy(
            opened.wanted,
            shards=[(share.tensors, share.as_is) for share in self.pieces],
            results=[(folder / share.name).read_bytes() for share in self.pieces],
            planner_data=paths_of(opened, self._names),
            checkpoint_id=target,
            user_metadata=opened.stored.user_metadata if opened.wanted is opened.stored else "",
        )

    def written_files(self, folder: Path) -> list[str]:
        """Returns the names of the data files that are noted in ``folder``."""
        notes = [folder / share.name for share in self.pieces if share.is_done(folder)]
        return [name for note in notes for name in _core.written_files(note.read_bytes())]

    def finish(self, opened: Opened, folder: Path, target: Path, verify: bool) -> None:
        """See ``Target``. The metadata file, without which there is no checkpoint, comes last."""
        checkpoint = self.assembled(opened, folder, str(target))
        files = {name for name, *_ in checkpoint.files()}
        for left in folder.glob("*.distcp"):  # of a share that was interrupted
            if left.name not in files:
                left.unlink()
        metadata = checkpoint.plain_metadata_file() if self._is_plain else checkpoint.metadata_file()
        write_small_file(folder / _METADATA, metadata, sync_folder=False)
        for share in self.pieces:
            (folder / share.name).unlink()
        if verify:
            verify_checkpoint(folder).raise_if_damaged()


def _shares(outputs: Outputs, most_bytes: int, is_plain: bool) -> Iterator[Share]:
    """Distributes all that is written over files, in the order of the names; objects come last."""
    tensors: list[tuple[str, str, int, int]] = []
    as_is: list[str] = []
    number = filled = 0

    def share() -> Share:
        return Share(number, is_plain, tuple(tensors), tuple(as_is), filled)

    pieces: list[tuple[int, Callable[[], None]]] = []
    for tensor in outputs.tensors:
        for first, rows, num_bytes in _cuts(tensor, most_bytes):
            chunk = (tensor.name, tensor.dtype, first, rows)
            pieces.append((num_bytes, lambda chunk=chunk: tensors.append(chunk)))  # type: ignore[misc]
    others = {name: num_bytes for name, (num_bytes, _) in outputs.opaque.items()} | outputs.objects
    for name, num_bytes in others.items():
        pieces.append((num_bytes, lambda name=name: as_is.append(name)))  # type: ignore[misc]
    for num_bytes, add in pieces:
        if filled and filled + num_bytes > most_bytes:
            yield share()
            tensors, as_is, number, filled = [], [], number + 1, 0
        add()
        filled += num_bytes
    yield share()


def _cuts(tensor: OutputTensor, most_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first row, rows, bytes) of the chunks of a tensor."""
    rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.num_bytes // rows if rows else 0
    at_most = max(1, most_bytes // row_bytes) if row_bytes else max(1, rows)
    parts = max(1, math.ceil(rows / at_most))
    for part in range(parts):
        first, end = rows * part // parts, rows * (part + 1) // parts
        yield first, end - first, (end - first) * row_bytes

# SPDX-License-Identifier: Apache-2.0
"""A file that ``torch.load`` reads, as a target: the state dict, nested as it was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.compat.torch_pickle import Storage, pickled
from bytecheckpoint.contents.safe_objects import plain_object
from bytecheckpoint.convert.file_piece import write_file
from bytecheckpoint.convert.nesting import nested, paths_of, refuse_clashes, refuse_gaps
from bytecheckpoint.convert.outputs import Outputs, OutputTensor
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.native import _core

__all__ = ["TorchPiece", "TorchTarget", "export_state", "read_objects", "stand_ins"]


def export_state(
    path: str,
    state: Any,
    tensors: Sequence[OutputTensor],
    source: Source,
    opened: Opened,
    tell: Callable[[int], object],
    *,
    needs_crc: bool = False,
) -> tuple[int, int]:
    """Writes a state dict as ``torch.save`` does. The elements of its tensors are streamed from a source.

    Args:
        path: File to make.
        state: Any value of which tensors of ``stand_ins`` are leaves. Other tensors, as objects have, are written from
            memory.
        tensors: What was passed to ``stand_ins``.
        source: What has the elements.
        opened: The same, opened.
        tell: Called with the bytes that were written so far.
        needs_crc: Whether to compute the CRC of the file.

    Returns:
        The bytes of the file, and their CRC, which is 0 if nobody needs it.
    """
    pickle, held = pickled(state, len(tensors))
    return _core.export_torch_file(
        opened.wanted,
        path=path,
        pickle=pickle,
        tensors=[(each.name, each.dtype, each.num_bytes) for each in tensors],
        held=held,
        needs_crc=needs_crc,
        **source.options(tell),
    )


def stand_ins(tensors: Sequence[OutputTensor]) -> dict[str, Any]:
    """Returns what stands for each tensor in a state dict that is exported, by name. It may stand in several places."""
    return {each.name: Storage(number, each).tensor() for number, each in enumerate(tensors)}


@dataclass(frozen=True)
class TorchPiece:
    """The file.

    Attributes:
        name: Its name.
        tensors: Its tensors.
        objects: Names of its objects.
    """

    name: str
    tensors: tuple[OutputTensor, ...]
    objects: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """See ``TargetPiece``."""
        return sum(each.num_bytes for each in self.tensors)

    @property
    def is_verified_alone(self) -> bool:
        """See ``TargetPiece``."""
        return True

    def is_done(self, folder: Path) -> bool:
        """See ``TargetPiece``."""
        return (folder / self.name).is_file()

    def write(self, source: Source, opened: Opened, folder: Path, verify: bool, tell: Callable[[int], object]) -> None:
        """See ``TargetPiece``."""
        values = stand_ins(self.tensors) | read_objects(self.objects, source, opened)
        paths = paths_of(opened, [*values])
        state = nested({paths[name]: value for name, value in values.items()})
        write_file(
            folder / self.name,
            opened,
            verify,
            lambda path: export_state(path, state, self.tensors, source, opened, tell, needs_crc=verify),
        )


def read_objects(names: Sequence[str], source: Source, opened: Opened) -> dict[str, Any]:
    """Returns objects of a source, by name. No code of them is run.

    Raises:
        UnsafeObjectError: One of them needs code.
    """
    records = source.reader(opened, []).read_objects(names)
    return {
        name: plain_object(name, bytearray(record), source.config) for name, record in zip(names, records, strict=True)
    }


class TorchTarget:
    """One file.

    Args:
        outputs: What is written.
        name: Name of the file.

    Raises:
        UnsupportedError: There is a quantized tensor.
    """

    is_file = True

    def __init__(self, outputs: Outputs, name: str) -> None:
        if outputs.opaque:
            raise UnsupportedError(f"quantized tensors are not written to a file of torch: {outputs.opaque_text}")
        self.pieces = [TorchPiece(name, outputs.tensors, tuple(outputs.objects))]

    def check(self, opened: Opened) -> None:
        """See ``Target``."""
        (piece,) = self.pieces
        paths = paths_of(opened, [*(each.name for each in piece.tensors), *piece.objects])
        refuse_clashes(paths)
        refuse_gaps(paths)

    def identity(self) -> bytes:
        """See ``Target``."""
        (piece,) = self.pieces
        tensors = [(each.name, each.dtype, each.shape) for each in piece.tensors]
        return json.dumps([piece.name, tensors, piece.objects]).encode()

    def finish(self, opened: Opened, folder: Path, target: Path, verify: bool) -> None:
        """See ``Target``."""

# SPDX-License-Identifier: Apache-2.0
"""Safetensors as a target: files and an index, as Hugging Face names and reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from bytecheckpoint.convert.file_piece import write_file
from bytecheckpoint.convert.hf_config import FILE_NAMES
from bytecheckpoint.convert.outputs import Outputs, OutputTensor
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.errors import ConfigError, UnsupportedError
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _core
from bytecheckpoint.storage.small_files import write_small_file

__all__ = ["INDEX", "OutputFile", "SafetensorsTarget"]

INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
# The head ends at a multiple of this, which that of every element divides.
_ALIGNMENT = 64


@dataclass(frozen=True)
class OutputFile:
    """A file that is to be written.

    Attributes:
        name: Its name in the folder.
        tensors: Its tensors, in the order of their bytes.
        aliases: Other names of these tensors, each with the name that it has here.
    """

    name: str
    tensors: tuple[OutputTensor, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @cached_property
    def head(self) -> bytes:
        """What stands before the elements: the length of the header, and the header."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt", **dict(self.aliases)}}
        at = 0
        for each in self.tensors:
            offsets = [at, at + each.num_bytes]
            dtype, shape = _core.safetensors_dtype(each.dtype), [*each.shape]
            if dtype == "F4":  # two values in each element of torch
                shape[-1] *= 2
            entries[each.name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            at += each.num_bytes
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-(len(header) + 8) % _ALIGNMENT)
        return len(header).to_bytes(8, "little") + header

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return len(self.head) + sum(each.num_bytes for each in self.tensors)

    @property
    def is_verified_alone(self) -> bool:
        """See ``TargetPiece``."""
        return True

    def is_done(self, folder: Path) -> bool:
        """See ``TargetPiece``."""
        return (folder / self.name).is_file()

    def write(self, source: Source, opened: Opened, folder: Path, verify: bool, tell: Callable[[int], object]) -> None:
        """See ``TargetPiece``."""
        write_file(
            folder / self.name,
            opened,
            verify,
            lambda path: _core.export_file(
                opened.wanted,
                path=path,
                head=self.head,
                tensors=self.placed(),
                file_bytes=self.num_bytes,
                needs_crc=verify,
                **source.options(tell),
            ),
        )

    def placed(self) -> list[tuple[str, int, str]]:
        """Returns each tensor with its offset in the file and its dtype."""
        ends = accumulate((each.num_bytes for each in self.tensors), initial=len(self.head))
        return [(each.name, at, each.dtype) for each, at in zip(self.tensors, ends, strict=False)]


class SafetensorsTarget:
    """A folder that ``from_pretrained`` reads.

    Args:
        outputs: What is written.
        most_bytes: The most bytes of elements in a file. A tensor that is larger gets a file of its own.
        aliases: Names of tensors that are left out because they are another one, each with the name of that one. They
            are noted as ``save_pretrained`` notes them.
        beside: Small files that stand beside the weights, by name: those of ``HfConfig``.

    Raises:
        ConfigError: There is an object, or no tensor.
        UnsupportedError: Safetensors have no such dtype.
    """

    is_file = False

    def __init__(
        self,
        outputs: Outputs,
        most_bytes: int,
        aliases: Mapping[str, str] | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        _check(outputs)
        aliases = aliases or {}
        self._beside = beside or {}
        tensors = [each for each in outputs.tensors if each.name not in aliases]
        self.pieces = [_with_aliases(file, aliases) for file in _lay_out(tensors, most_bytes)]

    def check(self, opened: Opened) -> None:
        """See ``Target``. Safetensors have flat names."""

    def identity(self) -> bytes:
        """See ``Target``."""
        return b"".join(file.name.encode() + file.head for file in self.pieces)

    def finish(self, opened: Opened, folder: Path, target: Path, verify: bool) -> None:
        """See ``Target``. The index, without which several files are no model, comes last."""
        for name in FILE_NAMES:
            if name in self._beside:
                write_small_file(folder / name, self._beside[name], sync_folder=False)
            else:  # a conversion that was interrupted here may have had other ones
                (folder / name).unlink(missing_ok=True)
        if len(self.pieces) > 1:
            write_small_file(folder / INDEX, _index_of(self.pieces), sync_folder=False)


def _with_aliases(file: OutputFile, aliases: Mapping[str, str]) -> OutputFile:
    there = {each.name for each in file.tensors}
    return replace(file, aliases=tuple((alias, name) for alias, name in aliases.items() if name in there))


def _check(outputs: Outputs) -> None:
    if not outputs.tensors:
        raise ConfigError("there is no tensor to convert")
    if outputs.objects:
        raise ConfigError(
            f"safetensors hold tensors alone; these are objects: {listed([*map(repr, outputs.objects)])}; "
            "leave them out with exclude, or choose with include"
        )
    if outputs.opaque:
        raise UnsupportedError(f"safetensors cannot hold quantized tensors: {outputs.opaque_text}")
    others = [
        f"'{each.name}' is {each.dtype}" for each in outputs.tensors if _core.safetensors_dtype(each.dtype) is None
    ]
    if others:
        raise UnsupportedError(f"safetensors have no such dtype: {listed(others)}")


def _lay_out(tensors: Sequence[OutputTensor], most_bytes: int) -> list[OutputFile]:
    """Distributes tensors over files, in their order."""
    shards: list[list[OutputTensor]] = [[]]
    filled = 0
    for each in tensors:
        if shards[-1] and filled + each.num_bytes > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(each)
        filled += each.num_bytes
    # The largest elements come first, so that each tensor begins at a multiple of its own.
    ordered = [tuple(sorted(shard, key=lambda each: (-each.itemsize, each.name))) for shard in shards]
    if len(ordered) == 1:
        return [OutputFile(_ONE_FILE, ordered[0])]
    digits = max(5, math.floor(math.log10(len(ordered))) + 1)
    return [
        OutputFile(f"model-{number:0{digits}}-of-{len(ordered):0{digits}}.safetensors", shard)
        for number, shard in enumerate(ordered, 1)
    ]


def _index_of(files: Sequence[OutputFile]) -> bytes:
    """Returns the index of a model in several files."""
    weight_map = {each.name: file.name for file in files for each in file.tensors}
    total = sum(each.num_bytes for file in files for each in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"

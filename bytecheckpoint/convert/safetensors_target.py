# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a checkpoint are laid out in safetensors files, as Hugging Face names and reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from bytecheckpoint import _core
from bytecheckpoint.errors import ConfigError, UnsupportedError
from bytecheckpoint.listing import listed

__all__ = ["INDEX", "OutputFile", "OutputTensor", "index_of", "lay_out"]

INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
# The head ends at a multiple of this, which that of every element divides.
_ALIGNMENT = 64


@dataclass(frozen=True)
class OutputTensor:
    """A tensor in a file.

    Attributes:
        name: Its name.
        dtype: Its dtype in the file, as torch names it.
        shape: Its shape.
        num_bytes: Bytes of its elements.
        itemsize: Bytes of one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    itemsize: int


@dataclass(frozen=True)
class OutputFile:
    """A file that is to be written.

    Attributes:
        name: Its name in the folder.
        tensors: Its tensors, in the order of their bytes.
    """

    name: str
    tensors: tuple[OutputTensor, ...]

    @cached_property
    def head(self) -> bytes:
        """What stands before the elements: the length of the header, and the header."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
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

    def placed(self) -> list[tuple[str, int, str]]:
        """Returns each tensor with its offset in the file and its dtype."""
        ends = accumulate((each.num_bytes for each in self.tensors), initial=len(self.head))
        return [(each.name, at, each.dtype) for each, at in zip(self.tensors, ends, strict=False)]


def lay_out(tensors: Sequence[OutputTensor], most_bytes: int) -> list[OutputFile]:
    """Distributes tensors over files, in their order.

    Args:
        tensors: The tensors.
        most_bytes: The most bytes of elements in a file. A tensor that is larger gets a file of its own.

    Raises:
        UnsupportedError: Safetensors have no such dtype.
        ConfigError: There is no tensor.
    """
    others = [f"'{each.name}' is {each.dtype}" for each in tensors if _core.safetensors_dtype(each.dtype) is None]
    if others:
        raise UnsupportedError(f"safetensors have no such dtype: {listed(others)}")
    if not tensors:
        raise ConfigError("there is no tensor to convert")
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


def index_of(files: Sequence[OutputFile]) -> bytes:
    """Returns the index of a model in several files."""
    weight_map = {each.name: file.name for file in files for each in file.tensors}
    total = sum(each.num_bytes for file in files for each in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"

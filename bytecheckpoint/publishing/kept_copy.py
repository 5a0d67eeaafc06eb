# SPDX-License-Identifier: Apache-2.0
"""``KeptCopy``: what this rank has published last, against which changes are found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from bytecheckpoint.native import _C, _core
from bytecheckpoint.publishing.held_boxes import POSITIONS, VALUES, HeldBox
from bytecheckpoint.report.text import size_text

__all__ = ["Delta", "KeptCopy", "why_too_large"]

_SPARE_BYTES = 256 << 20  # of the machine, are left to what else it does
_SLACK_BYTES = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Delta:
    """What has changed on this rank.

    Attributes:
        tensors: The keys of a delta with their tensors: positions and values, in host memory.
        patches: The changes as ``_C.apply_patches`` takes them, for the copy.
    """

    tensors: dict[str, torch.Tensor]
    patches: list[_C.Patch]

    @property
    def num_elements(self) -> int:
        """Number of elements that have changed."""
        return sum(positions.numel() for *_, positions, _ in self.patches)

    @property
    def num_bytes(self) -> int:
        """Bytes of positions and values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class KeptCopy:
    """Row-major copies in host memory of the boxes that this rank publishes.

    Args:
        boxes: All boxes of this rank.
        published: Keys of those that it publishes: others hold the rest, too, and a lower rank publishes it.
    """

    def __init__(self, boxes: Sequence[HeldBox], published: Collection[str]) -> None:
        self.keys = frozenset(published)
        self._copies = {
            box.key: torch.empty(box.tensor.shape, dtype=box.tensor.dtype, device="cpu")
            for box in boxes
            if box.key in self.keys
        }
        self.num_bytes = sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def take(self, boxes: Sequence[HeldBox]) -> None:
        """Copies all of the boxes as they are now."""
        for box in boxes:
            if box.key in self._copies:
                _bits(self._copies[box.key]).copy_(_bits(box.tensor))

    def find(self, boxes: Sequence[HeldBox], num_threads: int) -> Delta | None:
        """Returns what differs from the copy now; None if that is more than about the boxes themselves.

        A tensor of a device is copied to the host first, one at a time.
        """
        own = [box for box in boxes if box.key in self._copies]
        here = [box for box in own if box.is_on_host]
        left = self.num_bytes + _SLACK_BYTES
        delta = Delta({}, [])
        for group in ([here] if here else []) + [[box] for box in own if not box.is_on_host]:
            copies = [self._copies[box.key] for box in group]
            now = [box.tensor.cpu() for box in group]
            found = _C.find_changes(now, copies, num_threads=num_threads, most_bytes=left)
            if found is None:
                return None
            left -= _add(delta, group, copies, found)
        return delta

    def apply(self, delta: Delta, num_threads: int) -> None:
        """Brings the copy to what was published."""
        _C.apply_patches(delta.patches, num_threads=num_threads)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as integers: torch cannot copy some dtypes, and may change NaNs where it converts."""
    return tensor if tensor.element_size() > 8 else tensor.view(_INTEGERS[tensor.element_size()])


def _add(delta: Delta, boxes: Sequence[HeldBox], copies: Sequence[torch.Tensor], found: _C.Changes) -> int:
    """Adds what was found to a delta, and returns its bytes."""
    num_bytes = 0
    for number, (box, copy, count) in enumerate(zip(boxes, copies, found.counts, strict=True)):
        if not count:
            continue
        wide = _C.position_bytes(copy.numel()) == 8
        positions = torch.empty(count, dtype=torch.uint64 if wide else torch.uint32, device="cpu")
        values = torch.empty(count, dtype=copy.dtype, device="cpu")
        found.write(number, positions, values)
        delta.tensors[POSITIONS + box.key], delta.tensors[VALUES + box.key] = positions, values
        origin = [0] * copy.ndim
        delta.patches.append((copy, origin, origin, list(copy.shape), positions, values))
        num_bytes += count * (positions.element_size() + values.element_size())
    return num_bytes


def why_too_large(num_bytes: int, here: str, on_host: int) -> str:
    """Returns why the machine has no room for the copies of all its ranks; "" if it has, or does not tell.

    Args:
        num_bytes: Bytes of the copy of this rank.
        here: What to call this machine.
        on_host: Bytes of the copies of all ranks of this machine.
    """
    available = _core.available_memory_bytes()
    if not 0 <= available < on_host + _SPARE_BYTES:
        return ""
    return (
        f"the copy of what was published, against which changes are found, takes {size_text(num_bytes)} on this rank "
        f"and {size_text(on_host)} on {here}, of which {size_text(available)} are available, and "
        f"{size_text(_SPARE_BYTES)} are left to what else it does: publish fewer tensors, or bases alone with "
        "base_every=1, which need no copy"
    )

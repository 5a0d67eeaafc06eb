# SPDX-License-Identifier: Apache-2.0
"""Deltas that were read into memory, whole and checked, before any of them is applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bytecheckpoint.config import Config
from bytecheckpoint.contents.opening import open_checkpoint
from bytecheckpoint.distributed.agreement import all_together
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _C, _core
from bytecheckpoint.publishing.held_boxes import (
    OBJECT,
    POSITIONS,
    VALUES,
    VERSION,
    Held,
    HeldBox,
    box_of_key,
    key_of_box,
)
from bytecheckpoint.state_dicts import load_state_dict
from bytecheckpoint.storage.paths import Place

__all__ = ["ReadDelta", "read_delta"]


@dataclass
class _Wanted:
    """A box of a delta of which this rank holds elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    positions: torch.Tensor
    values: torch.Tensor
    boxes: list[HeldBox]


@dataclass
class ReadDelta:
    """What a delta changes on this rank.

    Attributes:
        objects: Objects of the state, by name.
    """

    objects: dict[str, Any] = field(default_factory=dict)
    _wanted: list[_Wanted] = field(default_factory=list)

    def check(self) -> None:
        """Checks positions, so that nothing can fail when they are applied.

        Raises:
            CorruptCheckpointError: They do not fit the tensors.
        """
        _C.check_patches([_patch(wanted, box, _like(box)) for wanted in self._wanted for box in wanted.boxes])

    def apply(self, num_threads: int) -> None:
        """Writes the values into the tensors. Those of a device are changed on the host, one at a time."""
        of_box: dict[int, tuple[HeldBox, list[_Wanted]]] = {}
        for wanted in self._wanted:
            for box in wanted.boxes:
                of_box.setdefault(id(box), (box, []))[1].append(wanted)
        here = [_patch(wanted, box, box.tensor) for box, every in of_box.values() if box.is_on_host for wanted in every]
        _C.apply_patches(here, num_threads=num_threads)
        for box, every in of_box.values():
            if not box.is_on_host:
                on_host = box.tensor.cpu()
                _C.apply_patches([_patch(wanted, box, on_host) for wanted in every], num_threads=num_threads)
                box.tensor.copy_(on_host)


def _like(box: HeldBox) -> torch.Tensor:
    """Returns a tensor on the host as large as the box; memory that nobody touches is not taken."""
    return box.tensor if box.is_on_host else torch.empty(box.tensor.shape, dtype=box.tensor.dtype, device="cpu")


def _patch(wanted: _Wanted, box: HeldBox, memory: torch.Tensor) -> _C.Patch:
    return memory, box.offsets, wanted.offsets, wanted.sizes, wanted.positions, wanted.values


def read_delta(
    place: Place,
    held: Held,
    group: dist.ProcessGroup | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    config: Config,
) -> ReadDelta:
    """Reads what a delta changes in the boxes of each rank; all checksums are compared. Collective.

    Args:
        place: Folder of the delta.
        held: What this rank has.
        group: The ranks, for agreement.
        process_group: See ``load_state_dict``.
        no_dist: See ``load_state_dict``.
        config: Settings.

    Raises:
        CheckpointError: The load failed, on all ranks; see ``load_state_dict``.
    """
    read = all_together(group, "update", str(place), lambda: _chosen(place, held, config))
    into: dict[str, Any] = {VERSION: None}  # so that no rank asks for nothing
    for wanted in read._wanted:
        key = key_of_box(wanted.boxes[0].fqn, wanted.offsets, wanted.sizes)
        into[POSITIONS + key], into[VALUES + key] = wanted.positions, wanted.values
    into |= {OBJECT + fqn: value for fqn, value in read.objects.items()}
    load_state_dict(
        place,
        into,
        process_group=process_group,
        no_dist=no_dist,
        spec=LoadSpec(strict="model"),
        config=config,
    )
    read.objects = {fqn: into[OBJECT + fqn] for fqn in read.objects}
    all_together(group, "update", str(place), read.check)
    return read


def _chosen(place: Place, held: Held, config: Config) -> ReadDelta:
    """Returns what of a delta this rank wants, in memory that is still empty."""
    stored = open_checkpoint(place, config, kind=_core.Checkpoint).stored
    of_tensor: dict[str, list[HeldBox]] = {}
    for box in held.boxes:
        of_tensor.setdefault(box.fqn, []).append(box)
    read = ReadDelta()
    for key, dtype, shape, *_ in stored.contents():
        if key.startswith(OBJECT):
            name = key.removeprefix(OBJECT)
            if name in held.objects:
                read.objects[name] = None
            elif name in of_tensor:  # a number is loaded into a tensor, as it is from a base
                read.objects[name] = torch.empty_like(of_tensor[name][0].tensor)
        named = box_of_key(key)
        if named is None or dtype is None or len(shape) != 1:
            continue
        fqn, offsets, sizes = named
        boxes = [box for box in of_tensor.get(fqn, ()) if _fits(box, offsets) and box.overlaps(offsets, sizes)]
        if boxes:
            positions = torch.empty(shape[0], dtype=torch.uint64 if dtype == "uint64" else torch.uint32, device="cpu")
            values = torch.empty(shape[0], dtype=boxes[0].tensor.dtype, device="cpu")
            read._wanted.append(_Wanted(offsets, sizes, positions, values, boxes))
    return read


def _fits(box: HeldBox, offsets: Sequence[int]) -> bool:
    return len(box.offsets) == len(offsets)

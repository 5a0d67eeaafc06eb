# SPDX-License-Identifier: Apache-2.0
"""``RankPlan``: what the coordinator must know of a rank besides what it holds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from bytecheckpoint.distributed.call_order import check_same_kind
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.planning.key_choice import refuse_unmatched
from bytecheckpoint.tensors.equality import bits

__all__ = ["RankPlan", "check_ranks", "checksums_of_copies"]

Box = tuple[str, tuple[int, ...]]  # a key and offsets


@dataclass(frozen=True)
class RankPlan(SavePlan):
    """A plan of one rank, with what is compared between ranks.

    Attributes:
        unmatched: The patterns of the planner that match no key of this rank.
        copies: Checksums of the boxes that ranks hold copies of, and that nobody keeps equal.
    """

    unmatched: tuple[str, ...] = ()
    copies: Mapping[Box, int] = field(default_factory=dict)


def checksums_of_copies(flat: Mapping[str, Any], keys: Sequence[str]) -> dict[Box, int]:
    """Returns the checksums of the boxes of some ``LocalChunks``, which are small."""
    return {
        (key, at): zlib.crc32(bits(tensor.detach().cpu()).numpy().tobytes())
        for key in keys
        for at, tensor in zip(flat[key].offsets, flat[key].tensors, strict=True)
    }


def check_ranks(plans: Sequence[SavePlan]) -> None:
    """Compares the plans of all ranks.

    Raises:
        OutOfStepError: Ranks load meanwhile.
        ConfigError: A pattern matches no key of any rank.
        InvalidPlanError: Copies of a box differ.
    """
    check_same_kind("save", "", {rank: "load" for rank, plan in enumerate(plans) if isinstance(plan, LoadPlan)})
    refuse_unmatched([getattr(plan, "unmatched", ()) for plan in plans])
    first: dict[Box, tuple[int, int]] = {}  # checksum and rank
    for rank, plan in enumerate(plans):
        for box, checksum in getattr(plan, "copies", {}).items():
            known, of_rank = first.setdefault(box, (checksum, rank))
            if known != checksum:
                raise InvalidPlanError(
                    f"'{box[0]}': rank {of_rank} and rank {rank} hold different values, and different shards of the "
                    "tensor that this is a part of: a scale of a shard means nothing to another shard, so this "
                    "cannot be resharded. Compute it over all ranks, or save with Config(tensor_subclasses='opaque'), "
                    "which keeps each shard whole"
                )

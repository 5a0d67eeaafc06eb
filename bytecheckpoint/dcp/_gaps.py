# SPDX-License-Identifier: Apache-2.0
"""What a save makes of a tensor of which its ranks hold but parts."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint import _C
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._calls import SAVE, local_of_call
from bytecheckpoint.dcp.metadata import plan_of

__all__ = ["check_planned_metadata", "gaps_of_call"]


def gaps_of_call(config: Config) -> str:
    """As C++ names it: ``mark`` where partial tensors are meant, ``ignore`` where each rank saves on its own in the
    call of DCP that this thread is in, else ``refuse``."""
    if config.allow_partial_tensors:
        return "mark"
    return "ignore" if local_of_call(*SAVE, "use_collectives") is False else "refuse"


def check_planned_metadata(gaps: str) -> None:
    """Looks at what another planner than ours has planned in the call of DCP that this thread is in, before a byte is
    written. Where that is not found, the check behind the writing finds the same.

    Raises:
        InvalidPlanError: The chunks of a tensor overlap, or leave a gap and ``gaps`` refuses that.
    """
    metadata = local_of_call(*SAVE, "global_metadata")
    if isinstance(metadata, Metadata) and plan_of(metadata) is None:
        _C.check_coverage(metadata.state_dict_metadata, gaps)

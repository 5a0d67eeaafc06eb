# SPDX-License-Identifier: Apache-2.0
"""How a save treats a tensor of which its ranks hold only parts."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.metadata import plan_of
from bytecheckpoint.native import _C

__all__ = ["check_planned_metadata", "gaps_of_save"]


def gaps_of_save(config: Config, use_collectives: bool | None) -> str:
    """Returns what C++ is to do with gaps in a tensor.

    Args:
        config: Settings of the writer or the planner.
        use_collectives: False if each rank saves on its own; None if that is not known.

    Returns:
        ``mark`` if ``config.allow_partial_tensors``. Otherwise ``ignore`` if each rank saves on its own, else
        ``refuse``.
    """
    if config.allow_partial_tensors:
        return "mark"
    return "ignore" if use_collectives is False else "refuse"


def check_planned_metadata(planned: Metadata | None, gaps: str) -> None:
    """Checks the plan of a planner that is not ours, before a byte is written.

    Args:
        planned: Metadata of the plan. If they are not known (None), the check after the writing finds the same faults.
        gaps: Result of ``gaps_of_save``.

    Raises:
        InvalidPlanError: The chunks of a tensor overlap, or they leave a gap and ``gaps`` is ``refuse``.
    """
    if planned is not None and plan_of(planned) is None:
        _C.check_coverage(planned.state_dict_metadata, gaps)

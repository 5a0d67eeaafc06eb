# SPDX-License-Identifier: Apache-2.0
"""Plans that the coordinator gets without their items, and how it asks for the items after all.

Ranks with planners of ours send a digest, or a handle, where nobody is known to look at the items of other ranks. Each
of them decides that by itself. So every rank notes on its plan whether somebody will look because of it, and the
coordinator, which alone sees all notes, asks all ranks for whole plans if items are away that somebody will look at.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from bytecheckpoint.distributed.channel import Peers
from bytecheckpoint.planning.inventory import LazyPaths, may_look, may_send_digest
from bytecheckpoint.planning.plan_items import PlanItems

__all__ = ["SEND_WHOLE", "are_lacking", "note_looks", "send_handle", "send_little", "whole", "with_answers"]

# What the coordinator sends in place of a result, to ask for whole plans.
SEND_WHOLE = "bytecheckpoint: send whole plans"

_ANSWERS, _LOOKS = "bytecheckpoint_answers", "bytecheckpoint_looks"


def note_looks(plan: Any, looks: bool) -> None:
    """Notes on the plan of a rank whether because of this rank the coordinator will look at the items of all ranks."""
    vars(plan)[_LOOKS] = looks  # plans are frozen, and a planner that keeps its own does not mind


def send_little(plan: SavePlan, peers: Peers | None, looks: bool) -> None:
    """Lets DCP gather only the digest of what a rank holds where that is enough, and notes who will look at more.

    Args:
        plan: Local plan of a save.
        peers: The ranks of the call; None if they are not known.
        looks: Whether the writer may look at items of other ranks.
    """
    if not looks:
        may_send_digest(plan.items, peers)
    note_looks(plan, looks or may_look(plan.items))


def send_handle(plan: LoadPlan) -> bool:
    """Lets DCP gather only a handle of what a rank reads, if that is enough. Returns whether it does."""
    items = plan.items
    if not isinstance(items, PlanItems) or not items.may_send_handle:
        return False
    items.send_handle()
    return True


def with_answers(plan: Any) -> Any:
    """Returns a copy of a rank's plan that says that the rank understands ``SEND_WHOLE``, in this exchange.

    Nobody is asked unless all ranks do. The planner may keep its plan for a call in which the rank does not.
    """
    noted = copy.copy(plan)
    vars(noted)[_ANSWERS] = True
    return noted


def are_lacking(gathered: Sequence[Any]) -> bool:
    """Returns whether the coordinator lacks items of the plans that it gathered, which somebody will look at there."""
    answer = all(getattr(plan, _ANSWERS, False) for plan in gathered)  # also of what is no plan, but a failure
    looks = answer and any(getattr(plan, _LOOKS, True) for plan in gathered)
    return looks and any(getattr(part, "is_away", False) for plan in gathered for part in _parts(plan))


def whole(plan: Any) -> Any:
    """Returns a plan whose items are sent with it; the exception, as DCP wraps those of hooks, if they cannot be."""
    try:
        for part in _parts(plan):
            if isinstance(part, PlanItems | LazyPaths):
                part.send_whole()
    except Exception as error:
        return error, traceback.extract_tb(error.__traceback__)
    return plan


def _parts(plan: Any) -> tuple[Any, Any]:
    """Returns the parts of a plan that may be sent later. A hook may have replaced one of them and kept the other."""
    return plan.items, plan.planner_data

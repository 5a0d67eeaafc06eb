# SPDX-License-Identifier: Apache-2.0
"""Objects that DCP's own load planner puts elsewhere than where the caller looks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from bytecheckpoint.dcp._own_keys import OwnKeys
from bytecheckpoint.listing import listed

__all__ = ["warning_of_dcp"]

# A warning names no more keys of each kind than this.
_MOST_WARNED = 5


def warning_of_dcp(path: str, plan: LoadPlan, planner: object) -> str | None:
    """Returns the text of a warning; None if DCP's planner treats all objects as ours does, or for another planner.

    Call it before the objects are loaded, because they change the state dict.

    Args:
        path: Path of the checkpoint, for the message.
        plan: What this rank loads.
        planner: Planner of the load.
    """
    if type(planner) is not DefaultLoadPlanner:
        return None
    own_keys, misplaced, replaced = OwnKeys(), list[str](), list[str]()
    for item in plan.items:
        if item.type != LoadItemType.BYTE_IO:
            continue
        fqn = item.dest_index.fqn
        if planner.flatten_state_dict and _is_misplaced(planner.original_state_dict, planner.mappings[fqn], own_keys):
            misplaced.append(fqn)
        elif isinstance(planner.state_dict.get(fqn), torch.Tensor):
            replaced.append(fqn)
    texts = []
    if misplaced:
        texts.append(
            f"it puts these values under the text of a key that is not text, beside the value under that key, which "
            f"stays: {listed([*map(repr, misplaced)], _MOST_WARNED)}"
        )
    if replaced:
        texts.append(
            f"it puts an object in the place of these tensors of the state dict, which stay as they are: "
            f"{listed([*map(repr, replaced)], _MOST_WARNED)}"
        )
    if not texts:
        return None
    return f"load({path}) by DCP's DefaultLoadPlanner: {'; '.join(texts)}. BcpLoadPlanner loads what the state dict has"


def _is_misplaced(state_dict: Any, path: tuple[Any, ...], own_keys: OwnKeys) -> bool:
    for step in path:
        key = own_keys.key_of(state_dict, step)
        if key is not step:
            return True
        state_dict = state_dict[key]
    return False

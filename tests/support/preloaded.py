# SPDX-License-Identifier: Apache-2.0
"""The modules that servers import before they fork ranks. Most ranks use them, and importing them runs nothing."""

from __future__ import annotations

__all__ = ["PRELOADED"]

PRELOADED = (
    "torch",
    "torch._dynamo",  # the first operation on a DTensor imports it
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "bytecheckpoint._C",
    "bytecheckpoint.dcp.load_planner",
    "bytecheckpoint.dcp.save_planner",
    "bytecheckpoint.state_dicts",
    "bytecheckpoint.training_state.checkpointers",
)

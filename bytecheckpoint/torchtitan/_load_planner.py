# SPDX-License-Identifier: Apache-2.0
"""A load planner whose errors say what to do if a checkpoint does not fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.errors import InvalidPlanError, KeyMismatchError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _C
from bytecheckpoint.tensors.casts import Cast

__all__ = ["ResumePlanner"]

_DATA_RANK = re.compile(r"dataloader\.dp_rank_(\d+)")
_OTHER_DATA_RANKS = (
    "The checkpoint was saved by another number of data ranks, and torchtitan's data loader cannot be split anew. "
    'Go on without its place in the data: checkpoint.exclude_from_loading=["dataloader"]'
)

_logger = logging.getLogger("bytecheckpoint")


class ResumePlanner(BcpLoadPlanner):
    """Plans the load of a training state, or of a model alone.

    If only a model is loaded, its dtype may differ from the checkpoint's: values are converted, with a warning.
    Resuming with another dtype is a ``ShapeMismatchError``. With a spec, its ``cast`` decides instead.

    Args:
        states: Top-level keys of the state dict that are not parameters of the model; empty for a model alone.
        spec: What to take of the checkpoint; None takes it as it is.

    During a load it raises, in addition to what ``BcpLoadPlanner`` raises, an ``InvalidPlanError`` if the number of
    data ranks differs.
    """

    def __init__(self, states: tuple[str, ...], spec: LoadSpec | None = None) -> None:
        super().__init__(spec=spec)
        self._states = states

    def create_local_plan(self) -> LoadPlan:
        """Plans what this rank loads, and checks that it fits the checkpoint."""
        self._compare_data_ranks(self._checkpoint())
        try:
            return super().create_local_plan()
        except KeyMismatchError as error:
            if self.spec is not None:
                raise
            raise KeyMismatchError(f"{error}. {self._advice()}", error.path) from error

    def _why_not_cast(self, casts: Sequence[Cast]) -> str:
        """See ``BcpLoadPlanner``. Without a spec, the model's dtype may differ if nothing else is loaded."""
        if self.spec is not None:
            return super()._why_not_cast(casts)
        others = [
            f"'{fqn}' is {stored} in the checkpoint and {str(to).removeprefix('torch.')} in the model"
            for fqn, stored, to in casts
            if fqn.split(".", 1)[0] not in self._states
        ]
        if not others:
            return ""
        if self._states:
            return (
                f"{listed(others)}: resuming would change values. Train with the dtype of the checkpoint "
                "(training.dtype), or begin anew with its weights converted: checkpoint.initial_load_path, and another "
                "checkpoint.folder"
            )
        _logger.warning("%s: values are converted", listed(others, 1))
        return ""

    def _checkpoint(self) -> _C.Checkpoint:
        assert self.metadata is not None
        return checkpoint_of(self.metadata)

    def _advice(self) -> str:
        stored = {name for name, *_ in self._checkpoint().contents()}
        missing = {fqn.split(".", 1)[0] for fqn in self.state_dict if fqn not in stored}
        of_states = [name for name in self._states if name in missing]
        if not of_states:
            return (
                "Parameters of the model are missing: it is another model, or its names have changed; load it with the "
                "configuration that it was saved with"
            )
        if not any(fqn.split(".", 1)[0] in self._states for fqn in stored):
            return (
                "The checkpoint holds the model alone, as the last one of a run does (checkpoint.last_save_model_only) "
                "and a seed checkpoint. To go on training, resume from a step before it (checkpoint.load_step); to "
                "begin with its weights, give it as checkpoint.initial_load_path, and another checkpoint.folder"
            )
        names = ", ".join(f'"{name}"' for name in of_states)
        if of_states == ["dataloader"]:
            return _OTHER_DATA_RANKS
        return f"To go on without what is missing: checkpoint.exclude_from_loading=[{names}]"

    def _compare_data_ranks(self, checkpoint: _C.Checkpoint) -> None:
        """Refuses another number of data ranks. torchtitan's data loader would fail in an assertion after the load."""
        num_ranks = self.state_dict.get("dataloader.world_size")
        if type(num_ranks) is not int or not checkpoint.is_whole:
            return
        ranks = [match[1] for name, *_ in checkpoint.contents() if (match := _DATA_RANK.fullmatch(name))]
        if any(int(rank) >= num_ranks for rank in ranks):
            raise InvalidPlanError(f"{_OTHER_DATA_RANKS}: it has 'dataloader.dp_rank_{max(ranks, key=int)}'")

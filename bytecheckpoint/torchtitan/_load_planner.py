# SPDX-License-Identifier: Apache-2.0
"""A load planner whose errors say what to do if a checkpoint does not fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint import _C
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.errors import InvalidPlanError, KeyMismatchError

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
    Resuming with another dtype is an error.

    Args:
        states: Top-level keys of the state dict that are not parameters of the model; empty for a model alone.

    During a load it raises, in addition to what ``BcpLoadPlanner`` raises, an ``InvalidPlanError`` if the dtype or the
    number of data ranks differs.
    """

    def __init__(self, states: tuple[str, ...]) -> None:
        super().__init__()
        self._states = states

    def create_local_plan(self) -> LoadPlan:
        """Plans what this rank loads, and checks that it fits the checkpoint."""
        self._compare_data_ranks(self._checkpoint())
        try:
            plan = super().create_local_plan()
        except KeyMismatchError as error:
            raise KeyMismatchError(f"{error}. {self._advice()}", error.path) from error
        self._compare_dtypes(self._checkpoint())
        return plan

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

    def _compare_dtypes(self, checkpoint: _C.Checkpoint) -> None:
        if not checkpoint.is_whole:
            return  # for example of ten thousand ranks: this rank has read only the metadata that it needs
        stored = {name: dtype for name, dtype, *_ in checkpoint.contents() if dtype is not None}
        others = [
            f"'{fqn}' is {stored[fqn]} in the checkpoint and {held} in the model"
            for fqn, held in _dtypes(self.state_dict, self._states)
            if stored.get(fqn, held) != held
        ]
        if not others:
            return
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        if self._states:
            raise InvalidPlanError(
                f"{others[0]}{more}: resuming would change values. Train with the dtype of the checkpoint "
                "(training.dtype), or begin anew with its weights converted: checkpoint.initial_load_path, and another "
                "checkpoint.folder"
            )
        _logger.warning("%s%s: values are converted", others[0], more)


def _dtypes(state: Mapping[str, Any], without: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Returns name and dtype of each tensor that is not in ``without``; dtypes are named as in a checkpoint."""
    for fqn, value in state.items():
        if isinstance(value, torch.Tensor) and fqn.split(".", 1)[0] not in without:
            yield fqn, str(value.dtype).removeprefix("torch.")

# SPDX-License-Identifier: Apache-2.0
"""Planners, writers and readers that raise in one hook on one rank."""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from bytecheckpoint import BcpLoadPlanner, BcpSavePlanner, BcpWriter

__all__ = [
    "LOAD_PLANNER_HOOKS",
    "SAVE_PLANNER_HOOKS",
    "WRITER_HOOKS",
    "BcpFailsLate",
    "FailingBcpLoadPlanner",
    "FailingBcpSavePlanner",
    "FailingLoadPlanner",
    "FailingSavePlanner",
    "FailingWriter",
    "FailsLate",
    "Reason",
    "Unpicklable",
    "Unreadable",
    "Unspeakable",
]

SAVE_PLANNER_HOOKS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
    "broken_metadata",
)
WRITER_HOOKS = (
    "storage_meta",
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "after_write_data",
    "finish",
    "after_finish",
)
LOAD_PLANNER_HOOKS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_tensor",
    "commit_tensor",
    "load_bytes",
)


class Reason(Exception):
    """The error that hooks raise unless the test gives another one."""


class Unreadable(Exception):
    """An error that can be pickled but not unpickled, like many exceptions of real libraries."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt("within __reduce__")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("within __str__")


class _Failing:
    def __init__(self, *args: Any, hook: str, rank: int, error: BaseException | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hook = hook
        self.failing_rank = rank
        self.error = error

    def at(self, hook: str) -> None:
        if hook == self.hook and dist.get_rank() == self.failing_rank:
            raise self.error or Reason(f"{hook} on rank {self.failing_rank}")


# The mixins may use only what DCP's planners and ours have in common.
if TYPE_CHECKING:
    _Save, _Load = DefaultSavePlanner, DefaultLoadPlanner
else:
    _Save = _Load = object


class _FailingSavePlanner(_Failing, _Save):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.at("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self.at("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.at("create_global_plan")
        plans, metadata = super().create_global_plan(all_plans)
        if self.hook == "broken_metadata":
            entries = {**metadata.state_dict_metadata, "nobody writes this": BytesStorageMetadata()}
            metadata = dataclasses.replace(metadata, state_dict_metadata=entries)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.at("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn.startswith("shared.") or self.failing_rank == 0:
            self.at("resolve_data")
        return super().resolve_data(write_item)


class FailingWriter(_Failing, BcpWriter):
    def storage_meta(self) -> Any:
        self.at("storage_meta")
        return super().storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.at("set_up_storage_writer")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.at("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prepared = super().prepare_global_plan(plans)
        self.at("prepare_global_plan")  # the save has the right to commit here
        return prepared

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        self.at("write_data")
        future = super().write_data(plan, planner)
        self.at("after_write_data")
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        self.at("finish")
        super().finish(metadata, results)
        self.at("after_finish")


class _FailingLoadPlanner(_Failing, _Load):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.at("set_up_planner")
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        self.at("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.at("create_global_plan")
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.at("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        self.at("resolve_tensor")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.at("commit_tensor")
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.at("load_bytes")
        super().load_bytes(read_item, value)


class FailingSavePlanner(_FailingSavePlanner, DefaultSavePlanner):
    pass


class FailingBcpSavePlanner(_FailingSavePlanner, BcpSavePlanner):
    pass


class FailingLoadPlanner(_FailingLoadPlanner, DefaultLoadPlanner):
    pass


class FailingBcpLoadPlanner(_FailingLoadPlanner, BcpLoadPlanner):
    pass


class FailsLate(FailingLoadPlanner):
    """Has DCP's own ``finish_plan``, so it fails only after all ranks have come to read, and our reader knows that."""

    finish_plan = DefaultLoadPlanner.finish_plan


class BcpFailsLate(FailingBcpLoadPlanner):
    finish_plan = DefaultLoadPlanner.finish_plan

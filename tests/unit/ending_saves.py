# SPDX-License-Identifier: Apache-2.0
"""Saves that end at a hook of their planner: by an error, or with their process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpSavePlanner, BcpWriter, Config, save_state_dict

__all__ = ["Ending", "die", "save", "state"]


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(1000)}


class Ending(BcpSavePlanner):
    """Ends the save at one of its hooks: by an error, or with its process."""

    def __init__(self, hook: str, error: type[Exception] | None = None) -> None:
        super().__init__()
        self._hook, self._error = hook, error

    def _end(self, hook: str) -> None:
        if hook != self._hook:
            return
        if self._error is not None:
            raise self._error("the disk of the planner is full")
        os.kill(os.getpid(), signal.SIGKILL)

    def finish_plan(self, new_plan: Any) -> Any:
        self._end("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._end("resolve_data")
        return super().resolve_data(write_item)


def save(path: Path, planner: BcpSavePlanner | None = None, **settings: Any) -> None:
    save_state_dict(path, state(), planner=planner, no_dist=True, config=Config(**settings))


class DyingWriter(BcpWriter):
    """Dies when it has written its part."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        super().write_data(plan, planner)
        os.kill(os.getpid(), signal.SIGKILL)


def die(path: Path, hook: str, settings: dict[str, Any]) -> None:
    if hook == "write_data":
        dcp.save(state(), storage_writer=DyingWriter(path, config=Config(**settings)), no_dist=True)
    save(path, Ending(hook), **settings)

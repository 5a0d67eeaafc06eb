# SPDX-License-Identifier: Apache-2.0
"""For torchtitan before 0.3, which has no overrides.

    --experimental.custom_import bytecheckpoint.torchtitan.custom_import

Its trainer imports the module that is named there, before it makes its checkpoint manager. Importing this one changes
the class ``CheckpointManager`` of torchtitan for the process. Settings are those of ``BYTECHECKPOINT_*`` variables.

- 0.2: saves and loads go through our engine, as with the manager for 0.3, in all modes of ``async_mode``; a step folder
  counts if what it holds loads. Removing old checkpoints (``keep_latest_k``) stays torchtitan's.
- 0.1: ``bytecheckpoint.register()``, for it calls ``dcp.save``, ``async_save`` and ``load`` itself. Saves with
  ``async_with_pinned_mem`` stay torchtitan's, in a process of its own.

Which of them it is, is told by what the manager has; a manager that is built otherwise is refused at the import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.stager import BcpStager
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.local_path import is_url
from bytecheckpoint.probes.of_torchtitan import TORCHTITAN_0_1, TORCHTITAN_0_2
from bytecheckpoint.probes.probe import holds, require
from bytecheckpoint.registration import register
from bytecheckpoint.torchtitan import has_overrides
from bytecheckpoint.torchtitan._engine import Engine, raise_at_end, wait_for

__all__ = ["install"]


def install() -> None:
    """What importing the module does. A second time it has no effect.

    Raises:
        UnsupportedError: torchtitan is built otherwise; names the probe.
    """
    if has_overrides():
        raise UnsupportedError(
            "bytecheckpoint.torchtitan.custom_import is for torchtitan before 0.3; with this one give "
            "--override.imports bytecheckpoint.torchtitan.use"
        )
    if holds(TORCHTITAN_0_1):
        require(TORCHTITAN_0_1)
        register()
        return
    require(TORCHTITAN_0_2)
    from torchtitan.components import checkpoint

    if not hasattr(checkpoint.CheckpointManager, "_bcp_engine_of"):
        _change(checkpoint.CheckpointManager, checkpoint)


def _change(manager: type, module: Any) -> None:
    """On the class itself: the trainer that runs as ``__main__`` has a name of its own for it."""

    def replace(name: str) -> Callable[[Callable[..., Any]], None]:
        theirs = getattr(manager, name)

        def put(ours: Callable[..., Any]) -> None:
            @wraps(theirs)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                return ours(theirs, self, *args, **kwargs)

            setattr(manager, name, method)

        return put

    def engine_of(self: Any, path: str) -> Engine | None:
        return None if is_url(path) else getattr(self, "_bcp_engine", None)

    setattr(manager, "_bcp_engine_of", engine_of)  # noqa: B010  # mypy knows of no such attribute

    @replace("__init__")
    def init(theirs: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        config = Config.from_env()
        theirs(self, *args, **kwargs)
        if not hasattr(self, "folder"):
            return  # it is disabled
        self._bcp_engine = Engine(config, getattr(self, "pg", None))
        if self.async_mode == module.AsyncMode.ASYNC_WITH_PINNED_MEM and not is_url(self.folder):
            self.stager = BcpStager(overlap=True, config=config)

    @replace("dcp_save")
    @torch.no_grad()
    def dcp_save(
        theirs: Callable[..., Any],
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        engine = engine_of(self, checkpoint_id)
        if to_hf or engine is None:
            return theirs(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        saved: Any = None
        if async_mode == module.AsyncMode.ASYNC:
            saved = engine.save_async(checkpoint_id, state_dict)
        elif async_mode == module.AsyncMode.ASYNC_WITH_PINNED_MEM:
            saved = engine.save_overlapped(checkpoint_id, state_dict)
        else:
            engine.save(checkpoint_id, state_dict)
        if enable_garbage_collection:
            module.GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    @replace("dcp_load")
    def dcp_load(
        theirs: Callable[..., Any],
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        engine = engine_of(self, checkpoint_id)
        if from_hf or engine is None:
            theirs(self, state_dict, checkpoint_id, from_hf, from_quantized)
            return
        engine.load(checkpoint_id, state_dict, tuple(key for key in state_dict if key in self.states))
        if module.MODEL in self.states:
            self.states[module.MODEL].load_state_dict(state_dict)

    @replace("load")
    def load(theirs: Callable[..., bool], self: Any, step: int = -1) -> bool:
        engine = engine_of(self, self.folder) if self.enable else None
        if step != -1 and engine is not None:
            engine.check_step(self.folder, step)
        return theirs(self, step)

    @replace("_find_load_step")
    def find_load_step(theirs: Callable[..., int], self: Any, folder: str = "") -> int:
        engine = engine_of(self, folder or self.folder)
        return theirs(self, folder) if engine is None else engine.latest_step(folder or self.folder)

    @replace("close")
    def close(theirs: Callable[..., None], self: Any) -> None:
        engine, future = getattr(self, "_bcp_engine", None), getattr(self, "save_future", None)
        if engine is None:
            theirs(self)
            return
        self.save_future = None
        failed = wait_for(future)
        theirs(self)
        engine.close()
        raise_at_end(failed)


install()

# SPDX-License-Identifier: Apache-2.0
"""Turns our engine on in torchtitan before 0.3, which has no overrides.

Give its trainer this option:

    --experimental.custom_import bytecheckpoint.torchtitan.custom_import

The trainer imports the module that the option names, before it makes its checkpoint manager. Importing this module
changes torchtitan's class ``CheckpointManager`` in this process. Settings come from ``BYTECHECKPOINT_*`` variables.

- torchtitan 0.2: saves and loads go through our engine in all modes of ``async_mode``, as with the manager for 0.3. A
  step folder counts only if its checkpoint loads. torchtitan still removes old checkpoints (``keep_latest_k``) itself.
- torchtitan 0.1: it calls ``dcp.save``, ``async_save`` and ``load`` itself, so ``bytecheckpoint.register()`` is called.
  Saves with ``async_with_pinned_mem`` stay torchtitan's, in a process of its own.

Probes of the manager tell the versions apart. If the manager is built otherwise, the import raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from bytecheckpoint.checkpoint.local_path import is_url
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.stager import BcpStager
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.probes.of_torchtitan import TORCHTITAN_0_1, TORCHTITAN_0_2
from bytecheckpoint.probes.probe import holds, require
from bytecheckpoint.registration import register
from bytecheckpoint.torchtitan import has_overrides
from bytecheckpoint.torchtitan._engine import Engine, raise_at_end, wait_for

__all__ = ["install"]


def install() -> None:
    """Changes torchtitan's manager. Importing the module calls it; a second call has no effect.

    Raises:
        UnsupportedError: torchtitan is not built as we need it. The message names the probe that failed.
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
    """Replaces methods of the class ``manager`` itself.

    Replacing the name in its module would not help: the trainer, which runs as ``__main__``, has imported the class.
    """

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

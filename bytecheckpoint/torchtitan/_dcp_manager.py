# SPDX-License-Identifier: Apache-2.0
"""The checkpoint manager of torchtitan 0.3, through our engine."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import tyro
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer import MODEL, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from bytecheckpoint import config as settings
from bytecheckpoint.dcp.stager import BcpStager
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.probes.of_torchtitan import TORCHTITAN
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import LoadReport
from bytecheckpoint.storage.paths import is_url
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.tiers import Tiers
from bytecheckpoint.torchtitan._engine import Engine, leaves, raise_at_end, step_of, wait_for
from bytecheckpoint.torchtitan._metrics import TrainerMetrics
from bytecheckpoint.torchtitan._options import config_of, spec_of, tiers_of

__all__ = ["BcpCheckpointManager", "BcpCheckpointing", "EngineOptions", "InitialLoadSpec"]

_logger = logging.getLogger("bytecheckpoint")

# A recipe or the override sets the options. They are not command-line flags.
EngineOptions = Annotated[Mapping[str, Any] | settings.Config | None, tyro.conf.Suppress]
# A recipe may have a LoadSpec. On the command line it is the path of a file, where the recipe has our manager.
InitialLoadSpec = Annotated[
    str | LoadSpec | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE",
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: value is None or isinstance(value, str | LoadSpec),
        str_from_instance=lambda value: [str(value)],
    ),
]

if TYPE_CHECKING:
    from torchtitan.components.checkpointer import CheckpointManager as _Manager
else:
    _Manager = object


class BcpCheckpointing(_Manager):
    """Puts our engine into a subclass of ``CheckpointManager``: ``class X(BcpCheckpointing, TheirManager)``.

    The class that uses it declares its own ``Config`` with a field ``engine: EngineOptions = None``, as
    ``BcpCheckpointManager`` does, and ``initial_load_spec: InitialLoadSpec = None`` if it takes one. Everything else is
    still their manager's: when to save and to load, what belongs to a checkpoint, folders and names, Hugging Face
    weights, and URLs of stores that obstore does not know. What differs:

    - ``async_mode="async"``: ``save`` returns when the state is copied to host memory.
    - ``async_mode="async_with_pinned_mem"``: ``save`` returns when host tensors and objects are copied. Tensors on
      devices are copied when ``maybe_wait_for_staging`` returns, which the trainer calls before the optimizer's step.
    - If a background save failed, the next ``maybe_wait_for_saving`` raises a ``CheckpointError`` on all ranks. The
      next save and ``close`` call it.
    - A step folder counts only if its checkpoint loads. Others are passed over, with a warning.
    - The trainer's metrics logger gets ``checkpoint/save_duration_s`` and the like, see docs/exporters.md.
    - ``keep_latest_k`` counts complete checkpoints. One that is being saved is kept in addition.
    - With the option ``tiers`` saves go to the near place, and from there to the durable one; see ``Tiers``. A place
      that the option leaves out is the manager's folder. ``keep_latest_k`` counts near by. ``close`` waits for copies.
      A load takes the newest step of all places and of all machines, as ``resume`` does.
    - With ``initial_load_spec`` the initial load goes through our reader, also that of Hugging Face weights.
    """

    folder: str
    purge_thread: threading.Thread | None
    save_future: Future[Any] | None
    _loaded: LoadReport | None = None
    _tiers: Tiers | None = None
    _has_looked = False  # a load has looked for its step in tiers
    _in_tiers: str | None = None  # that step, if there is one

    def __init__(self, config: Any, **kwargs: Any) -> None:
        require(TORCHTITAN)
        engine_config = config_of(config.engine)
        self._initial_spec = spec_of(getattr(config, "initial_load_spec", None))
        self._is_initial_load = False
        super().__init__(config, **kwargs)
        if not self.enable:
            return
        if self._initial_spec is not None and not (self.initial_load_path or self.initial_load_in_hf):
            _logger.warning("initial_load_spec has no effect without initial_load_path or initial_load_in_hf")
        self._tiers = None if leaves(self.folder) else tiers_of(config.engine, self.folder)
        if self._tiers is not None:
            self.folder = str(self._tiers.place_to_write())
        self._engine = Engine(engine_config, self.pg)
        self._metrics, self._last_step = TrainerMetrics(self.states), 0
        if leaves(self.folder):
            return
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            # It replaces the stager that their manager makes. All saves of a process stage into the same memory.
            self.stager = cast(Any, BcpStager(overlap=True, config=engine_config))
        if self.purge_thread is not None:
            self._take_purge_thread_over()

    # Saving and loading.

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._last_step = curr_step
        has_saved = bool(super()._save(curr_step, last_step))
        self._metrics.log_saves(curr_step)
        return has_saved

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Saves through our engine; leaves Hugging Face weights and URLs to their manager."""
        if to_hf or leaves(checkpoint_id):
            theirs: Future[Any] | AsyncSaveResponse | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return theirs
        saved: Future[Any] | AsyncSaveResponse | None = None
        if async_mode == AsyncMode.ASYNC:
            saved = self._engine.save_async(checkpoint_id, state_dict)
            self._metrics.note(self._last_step, saved)
        elif async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            saved = self._engine.save_overlapped(checkpoint_id, state_dict)
            self._metrics.note(self._last_step, saved.upload_completion)
        else:
            report = self._engine.save(checkpoint_id, state_dict)
            self._metrics.log_saves(self._last_step)  # those before, which may have ended since the last step
            self._metrics.log(self._last_step, report, self._last_step)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads through our engine; leaves URLs to their manager, and Hugging Face weights if there is no spec."""
        spec = self._initial_spec if self._is_initial_load else None
        if (from_hf and spec is None) or leaves(checkpoint_id):
            if spec is not None:
                raise UnsupportedError(f"initial_load_spec: {checkpoint_id} is left to torchtitan, which takes no spec")
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        others = tuple(key for key in state_dict if key in self.states)
        path = self._in_tiers if self._in_tiers is not None and checkpoint_id == self.folder else checkpoint_id
        self._loaded = self._engine.load(path, state_dict, others, spec)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    # Which steps there are, and which are removed.

    def _load(self, step: int = -1) -> bool:
        if self._tiers is not None:
            self._in_tiers, self._has_looked = self._engine.step_in_tiers(self._tiers, step), True
        elif step != -1 and not leaves(self.folder):
            self._engine.check_step(self.folder, step)
        self._is_initial_load = step == -1  # until a step is found
        self._loaded = None
        try:
            if self._in_tiers is not None:
                _logger.info("loading %s", self._in_tiers)
                _make_local(self.folder)  # it may be missing on a new machine
            has_loaded = bool(super()._load(step))
        finally:
            self._in_tiers, self._has_looked = None, False
        if self._loaded is not None:
            self._metrics.log(getattr(self.states.get(TRAIN_STATE), "step", 0), self._loaded)
        return has_loaded

    def _find_load_step(self, folder: str = "") -> int:
        if self._tiers is not None and folder in ("", self.folder):
            path = self._in_tiers if self._has_looked else self._engine.step_in_tiers(self._tiers, -1)
            step = -1 if path is None else step_of(path)
        else:
            folder = folder or self.folder
            step = int(super()._find_load_step(folder)) if leaves(folder) else self._engine.latest_step(folder)
        self._is_initial_load = step == -1
        return step

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        # Their load wants a folder that this machine sees. A step of tiers may be in memory, or on other machines.
        if self._in_tiers is not None and folder in ("", self.folder):
            return self.folder
        return str(super()._create_checkpoint_id(step, folder))

    def _purge_stale_checkpoints(self) -> None:
        if leaves(self.folder):
            super()._purge_stale_checkpoints()
        elif self._should_purge():
            self.purge_queue.put(self.folder)

    def _take_purge_thread_over(self) -> None:
        """Replaces their thread that deletes old checkpoints by ours.

        Theirs deletes folders by name, complete or not. Ours looks at them first, and removes the commit mark before
        the files.
        """
        assert self.purge_thread is not None
        self.purge_queue.put(None)
        self.purge_thread.join()
        self.purge_thread = threading.Thread(
            target=_purge,
            args=(self.purge_queue, self._engine, self.keep_latest_k),
            name="bytecheckpoint-purge",
            daemon=True,
        )
        self.purge_thread.start()

    # The end.

    def _close(self) -> None:
        if not hasattr(self, "_engine"):  # the constructor failed
            super()._close()
            return
        future, self.save_future = self.save_future, None
        failed = wait_for(future)
        self._metrics.log_saves(self._last_step)
        if future is not None and failed is None:
            self._purge_stale_checkpoints()  # the last save was not complete yet when this ran before
        super()._close()
        self._engine.close()
        raise_at_end(failed or self._engine.wait_for_copies())


class BcpCheckpointManager(BcpCheckpointing, CheckpointManager):
    """torchtitan's ``CheckpointManager`` through our engine; see ``BcpCheckpointing``. A recipe uses its ``Config``."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Every field of ``CheckpointManager.Config``, and two more.

        Attributes:
            engine: A ``bytecheckpoint.Config``, or a mapping of some of its fields, and of ``tiers``: ``Tiers``, or a
                dict of their arguments. ``BYTECHECKPOINT_*`` variables determine the other fields.
            initial_load_spec: What the initial load takes of a checkpoint, under which names, in which form: a
                ``LoadSpec``, or the path of a TOML file with one. A job that resumes from its own folder ignores it, as
                it ignores the other ``initial_load`` settings. With ``initial_load_in_hf``, our reader fills the model
                from the safetensors in place of torchtitan's adapter.
        """

        engine: EngineOptions = None
        initial_load_spec: InitialLoadSpec = None

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            config_of(self.engine)  # raises now instead of minutes later
            spec_of(self.initial_load_spec)


def _make_local(folder: str) -> None:
    if not is_url(folder):
        with storage_errors("mkdir", folder):
            Path(folder).mkdir(parents=True, exist_ok=True)


def _purge(folders: queue.Queue[str | None], engine: Engine, keep_latest: int) -> None:
    while (folder := folders.get()) is not None:
        try:
            engine.remove_old(folder, keep_latest)
        except Exception:
            _logger.warning("old checkpoints in %s could not be removed", folder, exc_info=True)

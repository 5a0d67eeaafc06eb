# SPDX-License-Identifier: Apache-2.0
"""Makes our writer, reader and planners DCP's own defaults."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bytecheckpoint._replacing import Replacing
from bytecheckpoint.config import Config
from bytecheckpoint.local_path import is_local, is_url, local_path
from bytecheckpoint.probes.of_torch import PROCESS_MODE, REGISTER
from bytecheckpoint.probes.probe import holds, require

if TYPE_CHECKING:
    from bytecheckpoint.dcp.reader import BcpReader

__all__ = ["register", "registered", "unregister"]

_has_warned_of_url = False
_replaced: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, DCP's own, ours


def register(*, allow_pickle: bool = False, config: Config | None = None) -> None:
    """Makes ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` use our writer, reader and planners by default.

    Local, and for this process alone; call it on every rank, once, before saving. Whatever a call names itself
    (``storage_writer``, ``storage_reader``, ``planner``) is used as before. Without a writer or reader, a
    ``checkpoint_id`` that DCP would have given to its ``FileSystemWriter`` or ``FileSystemReader`` goes to ours, and so
    do ``file`` URLs. Other URLs go where DCP sends them, where nothing of our promise holds; the first one is a
    ``RuntimeWarning``. Checkpoints that stock DCP wrote load, too. A load with our reader and planner begins again
    when a newer save is committed meanwhile. Saves that ``async_save`` has begun keep what they were begun with. Where
    DCP names its classes elsewhere (``format_utils``, the Hugging Face classes) nothing changes.

    It stays until ``unregister``. Calling it again, or within a block of ``registered``, changes no settings.

    Args:
        allow_pickle: Load objects that torch's ``weights_only`` rules refuse; as ``Config(allow_pickle=True)``.
        config: Settings of all writers and readers that are made; None reads ``BYTECHECKPOINT_*`` variables each time.

    Raises:
        UnsupportedError: DCP of this torch is not built as it would have to be; names the probe. Nothing was changed.
        ConfigError: A ``BYTECHECKPOINT_*`` variable has a wrong value, with ``allow_pickle``.
    """
    _replacing.stay(allow_pickle=allow_pickle, config=config)


def unregister() -> None:
    """Takes ``register`` back: DCP has its own defaults again. No effect without ``register``.

    Blocks of ``registered`` that are open, in whatever thread, keep ours until the last of them ends.
    """
    _replacing.take_back()


@contextmanager
def registered(*, allow_pickle: bool = False, config: Config | None = None) -> Iterator[None]:
    """``register`` for the time of a ``with`` block.

    For all of the process: blocks may overlap, in several threads, and DCP has its own defaults again when the last of
    them has ended. Inside another block, or after ``register``, it changes no settings.
    """
    with _replacing.block(allow_pickle=allow_pickle, config=config):
        yield


def _replace(allow_pickle: bool, config: Config | None) -> None:
    if allow_pickle:
        config = _allowing_pickle(config)
    if _replaced:
        return
    replacements = _replacements(config)
    for module, name, _, ours in replacements:
        setattr(module, name, ours)
    _replaced.extend(replacements)


def _give_back() -> None:
    for module, name, theirs, ours in _replaced:
        if getattr(module, name) is ours:  # else somebody has replaced it since, and goes on
            setattr(module, name, theirs)
    _replaced.clear()


_replacing = Replacing(_replace, _give_back)


def _allowing_pickle(config: Config | None) -> Config:
    return dataclasses.replace(config or Config.from_env(), allow_pickle=True)


def _replacements(config: Config | None) -> list[tuple[ModuleType, str, Any, Any]]:
    """What to put where, once everything has been found to be as expected."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    from bytecheckpoint.dcp._stateful import QuickStateful, quick_copy
    from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
    from bytecheckpoint.dcp.save_planner import BcpSavePlanner

    saver: Any = state_dict_saver  # as a module of any names: those that are not public, too
    loader: Any = state_dict_loader
    require(REGISTER, anew=True)
    made: weakref.WeakSet[BcpReader] = weakref.WeakSet()
    setup = _storage_setup(saver._storage_setup, config, made)
    pairs: list[tuple[ModuleType, str, Any]] = [
        (saver, "_storage_setup", setup),
        (loader, "_storage_setup", setup),
        # The class itself where that does, so that whoever finds it there can subclass it.
        (saver, "DefaultSavePlanner", BcpSavePlanner if config is None else partial(BcpSavePlanner, config=config)),
        (loader, "DefaultLoadPlanner", BcpLoadPlanner),
        (loader, "_load_state_dict", _beginning_again(loader._load_state_dict, made)),
        (saver, "DefaultStager", _stager(setup, config)),
        (saver, "_stateful_to_state_dict", _counting(quick_copy(saver._stateful_to_state_dict))),
        (loader, "Stateful", QuickStateful),
    ]
    executors = ["_ThreadBasedAsyncCheckpointExecutor"]
    if holds(PROCESS_MODE):  # else the stager refuses saves in a process
        executors.append("_ProcessBasedAsyncCheckpointExecutor")
    pairs += [(saver, name, _filling(getattr(saver, name), setup, config)) for name in executors]
    return [(module, name, getattr(module, name), ours) for module, name, ours in pairs]


def _storage_setup(
    theirs: Callable[..., Any], config: Config | None, made: weakref.WeakSet[BcpReader]
) -> Callable[..., Any]:
    """DCP's choice of a writer or reader, with ours in the place of those of the file system.

    Args:
        made: Gets the readers.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    from bytecheckpoint.dcp.reader import BcpReader
    from bytecheckpoint.dcp.writer import BcpWriter

    def setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        stock: Any = FileSystemReader if reader else FileSystemWriter
        if storage or not checkpoint_id:
            return theirs(storage, checkpoint_id, reader)
        is_file_url = is_url(checkpoint_id) and is_local(checkpoint_id)
        if not is_file_url and not stock.validate_checkpoint_id(checkpoint_id):
            _warn_of_url(checkpoint_id)
            return theirs(storage, checkpoint_id, reader)
        if not reader:
            return BcpWriter(checkpoint_id, config=config)
        ours = BcpReader(checkpoint_id, config=config)
        made.add(ours)
        return ours

    return setup


def _warn_of_url(checkpoint_id: Any) -> None:
    """Once in a process."""
    global _has_warned_of_url
    if _has_warned_of_url or not is_url(checkpoint_id):
        return
    _has_warned_of_url = True
    scheme = str(checkpoint_id).partition("://")[0]  # the rest may hold secrets
    warnings.warn(
        f"bytecheckpoint: {scheme}://...: register() leaves URLs to DCP's own writer and reader: such a save is not "
        "all or nothing, has no checksums of ours, and a load runs what its pickles say",
        RuntimeWarning,
        stacklevel=4,
    )


def _beginning_again(theirs: Callable[..., None], made: weakref.WeakSet[BcpReader]) -> Callable[..., None]:
    """DCP's flow of a load; where both reader and planner are ours, from the beginning when a newer commit came."""
    from bytecheckpoint.dcp._again import load_until_unchanged

    signature = inspect.signature(theirs)

    @wraps(theirs)
    def load(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if given["storage_reader"] not in made or given.get("planner") is not None:
            theirs(*args, **kwargs)
        else:
            load_until_unchanged(partial(theirs, *args, **kwargs), given["storage_reader"])

    return load


def _stager(setup: Callable[..., Any], config: Config | None) -> Callable[..., Any]:
    """In the place of DCP's default stager, which is made for each save."""
    from bytecheckpoint import _background
    from bytecheckpoint.dcp._calls import ASYNC_SAVE, local_of_call
    from bytecheckpoint.dcp._direct import failing_planner, save_over_group
    from bytecheckpoint.dcp._groups import group_of_save
    from bytecheckpoint.dcp._turns import take_drawn_turn
    from bytecheckpoint.dcp.stager import BcpStager

    def fail_on_all(error: Exception) -> None:
        """The other ranks come to the save, and hear there that this one could not stage its state."""
        names = ("process_group", "no_dist", "checkpoint_id", "storage_writer", "async_checkpointer_type")
        group, no_dist, checkpoint_id, writer, kind = (local_of_call(*ASYNC_SAVE, name) for name in names)
        writer = writer or (checkpoint_id and setup(None, checkpoint_id))
        if writer is None or getattr(kind, "value", "") == "process":  # which every rank has of its own
            return
        turn = take_drawn_turn()
        own = group_of_save(group, bool(no_dist), config or Config.from_env(), str(checkpoint_id))
        if own is not None:
            told = _background.submit(
                str(checkpoint_id),
                lambda: save_over_group(
                    own,
                    {},
                    checkpoint_id=checkpoint_id,
                    storage_writer=writer,
                    planner=failing_planner(error),
                    turn=turn,
                ),
                "async_save",
            )
            told.is_seen = True

    class Telling(BcpStager):
        def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
            try:
                return super().stage(state_dict, **kwargs)
            except Exception as error:
                fail_on_all(error)
                raise

    def stager(options: Any = None) -> BcpStager:
        return Telling(True if getattr(options, "use_async_staging", False) else None, config=config)

    return stager


def _counting(copy: Callable[..., Any]) -> Callable[..., Any]:
    """DCP's first step that may fail: a call of ``async_save`` is counted before it."""
    from bytecheckpoint.dcp._calls import ASYNC_SAVE, is_called_by, local_of_call
    from bytecheckpoint.dcp._turns import draw_turn

    @wraps(copy)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if is_called_by(*ASYNC_SAVE):
            draw_turn(
                local_of_call(*ASYNC_SAVE, "process_group"), bool(local_of_call(*ASYNC_SAVE, "no_dist")), "async_save"
            )
        return copy(*args, **kwargs)

    return counted


def _filling(executor: type, setup: Callable[..., Any], config: Config | None) -> type:
    """An executor that chooses writer and planner before the save goes to a thread or to another process.

    The thread may outlive ``unregister``; the process knows nothing of ``register``. The failure of a save whose future
    nobody has looked at is raised by the next one, before it begins.
    """
    from bytecheckpoint import _background
    from bytecheckpoint.dcp._direct import failing_planner, save_over_group
    from bytecheckpoint.dcp._groups import group_of_save, keep_watching
    from bytecheckpoint.dcp._save_process import forget_process_of_other_ranks
    from bytecheckpoint.dcp._turns import take_drawn_turn
    from bytecheckpoint.dcp.save_planner import BcpSavePlanner
    from bytecheckpoint.dcp.writer import BcpWriter

    def nothing() -> None:
        """Other writers cannot give a save up."""

    is_process = executor.__name__ == "_ProcessBasedAsyncCheckpointExecutor"

    class Filling(executor):  # type: ignore[misc]
        def execute_save(
            self,
            staged: Any,
            *,
            checkpoint_id: Any = None,
            storage_writer: Any = None,
            planner: Any = None,
            process_group: Any = None,
            no_dist: bool = False,
            **rest: Any,
        ) -> Any:
            turn = take_drawn_turn()
            if storage_writer is None and checkpoint_id:
                storage_writer = setup(None, checkpoint_id)
            settings = config or Config.from_env()
            planner = BcpSavePlanner(config=config) if planner is None else planner
            if isinstance(storage_writer, BcpWriter):
                # A later save may direct the writer elsewhere before this begins, and the process may go elsewhere.
                checkpoint_id = local_path(checkpoint_id) if checkpoint_id else storage_writer.checkpoint_id
            path = str(checkpoint_id or getattr(storage_writer, "checkpoint_id", ""))
            give_up = storage_writer.cancel if isinstance(storage_writer, BcpWriter) else nothing
            # DCP's own makes threads for which the end of the process waits without end.
            self._executor = _background.SaveExecutor(path, staged, give_up, settings.exit_timeout_s)
            try:
                if settings.handle_sigterm:
                    _background.handle_sigterm(settings.exit_timeout_s)
                group = None if is_process else group_of_save(process_group, no_dist, settings, path)
                if is_process or group is not None:
                    # Saves through one process, or over one group, follow one another: their messages must not mix.
                    self._executor.queue = "process" if is_process else "async_save"
                if group is None or storage_writer is None:  # DCP refuses a save without writer and path
                    if is_process:
                        forget_process_of_other_ranks(process_group)
                    _background.raise_unseen()
                    return super().execute_save(
                        staged,
                        checkpoint_id=checkpoint_id,
                        storage_writer=storage_writer,
                        planner=planner,
                        process_group=process_group,
                        no_dist=no_dist or not is_process,
                        **rest,
                    )
                failed: Exception | None = None
                try:
                    _background.raise_unseen()
                except Exception as error:  # of this rank, maybe alone: the others hear of it in this save
                    failed, planner = error, failing_planner(error)
                future = self._executor.submit(
                    save_over_group,
                    group,
                    staged,
                    checkpoint_id=checkpoint_id,
                    storage_writer=storage_writer,
                    planner=planner,
                    turn=turn,
                    **rest,
                )
                if failed is not None:
                    future.is_seen = True
                    raise failed
            except BaseException:
                self._executor.give_back()
                raise
            keep_watching(group, future)
            return future

    Filling.__name__ = Filling.__qualname__ = executor.__name__
    return Filling

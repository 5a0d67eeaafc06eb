# SPDX-License-Identifier: Apache-2.0
"""``register()``: makes our writer, reader and planners DCP's defaults."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from bytecheckpoint.calls.of_dcp import SAVE_FLOW, AsyncSaveCall, FlowCall, is_called_by_async_save
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.call_context import explicit_call
from bytecheckpoint.dcp.default_storage import storage_setup
from bytecheckpoint.dcp.direct_calls import failing_planner, save_over_group
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.memory_first import is_in_tiers, save_by_tiers
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.repeated_loads import load_until_unchanged
from bytecheckpoint.dcp.safe_exchange import IS_FOUND, SafeWrapper
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.dcp.save_process import forget_process_of_other_ranks
from bytecheckpoint.dcp.stager import BcpStager
from bytecheckpoint.dcp.stateful import QuickStateful, quick_copy
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.distributed.call_order import draw_turn, take_drawn_turn
from bytecheckpoint.distributed.groups import group_of_save, keep_watching, own_group
from bytecheckpoint.distributed.launch import is_unaware, refuse_unaware_rank
from bytecheckpoint.journal.observers import OnReport, observe, stop_observing
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.planning.key_choice import KeyChoice
from bytecheckpoint.probes.of_torch import PROCESS_MODE, REGISTER
from bytecheckpoint.probes.probe import holds, require
from bytecheckpoint.runtime.patching import Replacing
from bytecheckpoint.staging import background as _background
from bytecheckpoint.staging.save_executor import SaveExecutor
from bytecheckpoint.staging.staged_state import StagedState, claimed, staging_of
from bytecheckpoint.storage.paths import location
from bytecheckpoint.storage.tiers import Tiers

__all__ = ["register", "registered", "unregister"]

_of_thread = threading.local()  # its attribute `given` refers to a staged state that DCP is about to save
_replaced: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, DCP's value, our value
_on_report: OnReport | None = None  # observes while ours are in place


def register(
    *,
    allow_pickle: bool = False,
    config: Config | None = None,
    spec: LoadSpec | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    tiers: Tiers | None = None,
    on_report: OnReport | None = None,
) -> None:
    """Makes ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` use our writer, reader and planners by default.

    Local: it changes this process only. Call it once on every rank, before saving. It stays until ``unregister``;
    calling it again, or within a block of ``registered``, changes no settings.

    Arguments that you pass explicitly (``storage_writer``, ``storage_reader``, ``planner``) still win. If a call passes
    no writer or reader, ours takes each ``checkpoint_id`` that DCP would have given to its ``FileSystemWriter`` or
    ``FileSystemReader``, and each ``file`` URL; if obstore is installed also URLs of object stores (``s3``, ``gs``,
    ``az``, ``http``). Other URLs still go to DCP's own classes, where none of our guarantees hold; the first one gives
    a ``RuntimeWarning``.

    Checkpoints that stock DCP wrote can be loaded, too. A load with our reader and planner begins again if a newer save
    is committed during it. A save that ``async_save`` has begun keeps the writer and planner that it began with. Where
    DCP uses its classes elsewhere (``format_utils``, the Hugging Face classes), nothing changes.

    Args:
        allow_pickle: Whether to load objects that torch's ``weights_only`` rules refuse; the same as
            ``Config(allow_pickle=True)``.
        config: Settings of all writers and readers that are made; None reads ``BYTECHECKPOINT_*`` variables each time.
        spec: What ``dcp.load`` loads, under which names, in which form, if it is passed no planner; see ``LoadSpec``.
        include: Patterns of the keys that ``dcp.save`` and ``dcp.async_save`` save, if they are passed no planner; see
            ``BcpSavePlanner``. They count for every such save.
        exclude: Patterns of the keys that they leave out.
        tiers: Places of the run. If a call passes no writer or reader, the last name in its ``checkpoint_id`` is the
            step: ``dcp.save(state, checkpoint_id="anything/step-100")`` saves to ``tiers / "step-100"``, and
            ``dcp.load`` takes it from the nearest place. A name that is no step is a ``ConfigError``.
        on_report: Function that gets the report of each save and load, in the process of the coordinator, as if it were
            passed to ``bytecheckpoint.observe`` until ``unregister``. A thread of ours calls it, soon after the call
            has ended; ``bytecheckpoint.observability.flush`` waits for it.

    Raises:
        UnsupportedError: DCP of this torch is not built as we need it. The message names the probe that failed. Nothing
            was changed.
        ConfigError: A pattern is none. Or a ``BYTECHECKPOINT_*`` variable has a wrong value, which is raised here only
            with ``allow_pickle``.
    """
    _replacing.install(asked=_Asked(allow_pickle, config, spec, KeyChoice(include, exclude), tiers, on_report))


def unregister() -> None:
    """Undoes ``register``, so that DCP has its own defaults again. It has no effect without ``register``.

    While blocks of ``registered`` are open in any thread, our classes stay until the last of these blocks ends.
    """
    _replacing.uninstall()


@contextmanager
def registered(
    *,
    allow_pickle: bool = False,
    config: Config | None = None,
    spec: LoadSpec | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    tiers: Tiers | None = None,
    on_report: OnReport | None = None,
) -> Iterator[None]:
    """Acts like ``register`` for the duration of a ``with`` block.

    It affects the whole process. Blocks of several threads may overlap; DCP has its own defaults again when the last of
    them has ended. Inside another block, or after ``register``, it changes no settings.

    Args:
        allow_pickle: See ``register``.
        config: See ``register``.
        spec: See ``register``.
        include: See ``register``.
        exclude: See ``register``.
        tiers: See ``register``.
        on_report: See ``register``.
    """
    with _replacing.block(asked=_Asked(allow_pickle, config, spec, KeyChoice(include, exclude), tiers, on_report)):
        yield


@dataclass(frozen=True)
class _Asked:
    """What ``register`` was asked for; see there."""

    allow_pickle: bool
    config: Config | None
    spec: LoadSpec | None
    choice: KeyChoice
    tiers: Tiers | None
    on_report: OnReport | None


def _replace(asked: _Asked) -> None:
    global _on_report
    if _replaced:
        return
    if asked.allow_pickle:
        config = dataclasses.replace(asked.config or Config.from_env(), allow_pickle=True)
        asked = dataclasses.replace(asked, config=config)
    replacements = _replacements(asked)
    for module, name, _, ours in replacements:
        setattr(module, name, ours)
    _replaced.extend(replacements)
    _on_report = asked.on_report
    if _on_report is not None:
        observe(_on_report)


def _give_back() -> None:
    global _on_report
    if _on_report is not None:
        stop_observing(_on_report)
    _on_report = None
    for module, name, theirs, ours in _replaced:
        if getattr(module, name) is ours:  # else somebody else has replaced it since, and theirs stays
            setattr(module, name, theirs)
    _replaced.clear()


_replacing = Replacing(_replace, _give_back)


def _replacements(asked: _Asked) -> list[tuple[ModuleType, str, Any, Any]]:
    """Checks that DCP is built as expected, and returns what to replace: module, name, DCP's value, our value."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    saver: Any = state_dict_saver  # Any, because type checkers do not know the private names of the module
    loader: Any = state_dict_loader
    require(REGISTER, anew=True)
    made: weakref.WeakSet[BcpReader] = weakref.WeakSet()
    config, choice, spec = asked.config, asked.choice, asked.spec
    setup = storage_setup(saver._storage_setup, asked.config, asked.tiers, made)
    save_flow = _with_call_context(saver._save_state_dict, "storage_writer", lambda: saver.DefaultSavePlanner)
    save_planner: Any = BcpSavePlanner
    if config or choice:
        save_planner = partial(BcpSavePlanner, config=config, include=choice.include, exclude=choice.exclude)
    pairs: list[tuple[ModuleType, str, Any]] = [
        (saver, "_storage_setup", setup),
        (loader, "_storage_setup", setup),
        # The class itself where possible, so that code that finds it there can subclass it.
        (saver, "DefaultSavePlanner", save_planner),
        (loader, "DefaultLoadPlanner", BcpLoadPlanner if spec is None else partial(BcpLoadPlanner, spec=spec)),
        *((module, "_DistWrapper", SafeWrapper) for module in (saver, loader) if IS_FOUND),
        (saver, "_save_state_dict", save_flow),
        (loader, "_load_state_dict", _beginning_again(loader, made)),
        (saver, "DefaultStager", _stager(setup, config, save_planner)),
        (saver, "_stateful_to_state_dict", _counting(quick_copy(saver._stateful_to_state_dict))),
        (loader, "Stateful", QuickStateful),
    ]
    executors = ["_ThreadBasedAsyncCheckpointExecutor"]
    if holds(PROCESS_MODE):  # else our stager refuses saves in another process
        executors.append("_ProcessBasedAsyncCheckpointExecutor")
    pairs += [(saver, name, _filling(getattr(saver, name), setup, config, save_planner)) for name in executors]
    return [(module, name, getattr(module, name), ours) for module, name, ours in pairs]


def _beginning_again(loader: Any, made: weakref.WeakSet[BcpReader]) -> Callable[..., None]:
    """Wraps DCP's flow of a load: with our reader and planner it begins again if a newer save was committed."""
    signature = inspect.signature(loader._load_state_dict)
    once = _with_call_context(loader._load_state_dict, "storage_reader", lambda: loader.DefaultLoadPlanner)

    @wraps(once)
    def load(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if given["storage_reader"] not in made or given.get("planner") is not None:
            once(*args, **kwargs)
        else:
            load_until_unchanged(partial(once, *args, **kwargs), given["storage_reader"])

    return load


def _with_call_context(flow: Callable[..., Any], storage: str, planner_of_now: Callable[[], Any]) -> Callable[..., Any]:
    """Wraps DCP's flow of a save or a load, so that the hooks that it calls know who takes part.

    Args:
        flow: DCP's function.
        storage: Name of the argument of ``flow`` that is the writer or reader.
        planner_of_now: Returns the class that DCP makes a planner of if the caller passed none.
    """
    signature = inspect.signature(flow)

    @wraps(flow)
    def with_context(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        around = FlowCall.of_thread(SAVE_FLOW) if isinstance(given[storage], BcpWriter) else None
        if around is not None and is_unaware() and around.lets_dcp_choose_ranks:
            refuse_unaware_rank("save", str(given[storage].path))
        if given.get("planner") is None:
            given["planner"] = planner_of_now()()
        state, _of_thread.given = getattr(_of_thread, "given", None), None
        staged = state and state()
        is_in_background = around is not None and around.background is not None
        writer = given[storage]
        if isinstance(writer, BcpWriter) and is_in_tiers(str(writer.checkpoint_id)):

            def save(writer: BcpWriter) -> Any:
                given[storage] = writer
                with explicit_call(writer, staging_of(staged), is_in_background, **given), claimed(staged):
                    return flow(**given)

            # A group of our own is made by all ranks at once, which nothing says of a thread of DCP.
            is_alone = given.get("no_dist", False) or is_in_background or not given.get("use_collectives", True)
            call = "save", str(writer.checkpoint_id)
            group = own_group(given.get("process_group"), is_alone, "calls", writer.config.stall_timeout_s, call)
            return save_by_tiers(writer, save, group)
        with explicit_call(writer, staging_of(staged), is_in_background, **given), claimed(staged):
            return flow(**given)

    return with_context


def _stager(
    setup: Callable[..., Any], config: Config | None, new_planner: Callable[[], SavePlanner]
) -> Callable[..., Any]:
    """Returns what replaces DCP's default stager, which DCP makes for each save."""

    def fail_on_all(call: AsyncSaveCall, error: Exception) -> None:
        """Joins the save with the other ranks, to tell them that this rank could not stage its state."""
        checkpoint_id = call.checkpoint_id
        writer = call.storage_writer or (checkpoint_id and setup(None, checkpoint_id))
        if writer is None or call.is_for_process:  # each rank has such a process of its own
            return
        turn = take_drawn_turn()
        own = group_of_save(call.group, call.no_dist, config or Config.from_env(), str(checkpoint_id))
        if own is not None:
            failing = _background.submit(
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
            failing.is_seen = True

    class ReportingStager(BcpStager):
        def _stage(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super()._stage(*args, **kwargs)
            except Exception as error:
                call = AsyncSaveCall.of_thread()
                if call is not None:
                    fail_on_all(call, error)
                raise

    def stager(options: Any = None) -> BcpStager:
        made = ReportingStager(True if getattr(options, "use_async_staging", False) else None, config=config)
        made._default_planner = new_planner()
        return made

    return stager


def _counting(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps DCP's first step that may fail, so that a call of ``async_save`` is counted before it can fail.

    The step also gets the state that will be saved; a staged state is noted for the flow of the save.
    """

    @wraps(copy)
    def counted(state_dict: dict[str, Any]) -> dict[str, Any]:
        call = AsyncSaveCall.of_thread() if is_called_by_async_save() else None
        if call is not None:
            draw_turn(call.group, call.no_dist, "async_save")
        copied: dict[str, Any] = copy(state_dict)
        _of_thread.given = weakref.ref(state_dict) if isinstance(state_dict, StagedState) else None
        return copied

    return counted


def _filling(
    executor: type, setup: Callable[..., Any], config: Config | None, new_planner: Callable[[], SavePlanner]
) -> type:
    """Returns an executor that chooses writer and planner before it passes the save to a thread or to another process.

    The choice must be made before, because the thread may outlive ``unregister``, and the other process knows nothing
    of ``register``. If a save failed and nobody has looked at its future, the next save raises that error before it
    begins.
    """

    def nothing() -> None:
        """Does nothing: writers that are not ours cannot cancel a save."""

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
                checkpoint_id = getattr(storage_writer, "checkpoint_id", checkpoint_id)
            settings = config or Config.from_env()
            planner = new_planner() if planner is None else planner
            if isinstance(storage_writer, BcpWriter):
                # Fix the absolute path now: before this save begins, a later save may direct the writer to another
                # path, and the process may change its working directory.
                checkpoint_id = location(checkpoint_id) if checkpoint_id else storage_writer.checkpoint_id
            path = str(checkpoint_id or getattr(storage_writer, "checkpoint_id", ""))
            give_up = storage_writer.cancel if isinstance(storage_writer, BcpWriter) else nothing
            # The end of the process would wait without limit for the threads of DCP's own executor.
            self._executor = SaveExecutor(path, staged, give_up, settings)
            try:
                if settings.handle_sigterm:
                    _background.handle_sigterm(settings.exit_timeout_s)
                group = None if is_process else group_of_save(process_group, no_dist, settings, path)
                if is_process or group is not None:
                    # Saves through one process, or over one group, run one after another: their messages must not mix.
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
                future = self._submit(
                    group,
                    staged,
                    checkpoint_id=checkpoint_id,
                    storage_writer=storage_writer,
                    planner=planner,
                    turn=turn,
                    **rest,
                )
            except BaseException:
                self._executor.give_back()
                raise
            keep_watching(group, future)
            return future

        def _submit(self, group: Any, staged: Any, *, planner: Any, **arguments: Any) -> Any:
            """Submits the save over ``group``. It fails on all ranks if an earlier save of this rank failed unseen."""
            failed: Exception | None = None
            try:
                _background.raise_unseen()
            except Exception as error:  # maybe on this rank alone: this save tells the others
                failed, planner = error, failing_planner(error)
            future = self._executor.submit(save_over_group, group, staged, planner=planner, **arguments)
            if failed is not None:
                future.is_seen = True
                raise failed
            return future

    Filling.__name__ = Filling.__qualname__ = executor.__name__
    return Filling

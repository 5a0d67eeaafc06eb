# SPDX-License-Identifier: Apache-2.0
"""Makes OLMo-core save and load through our writer, reader and planners.

After ``bytecheckpoint.olmo.install()``, ``olmo_core.distributed.checkpoint`` and the trainer's ``Checkpointer`` use
them for everything at a local path, and at the URLs of object stores that obstore knows, if it is installed. Other URLs
stay with OLMo-core's own classes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint._olmo_tiers import OlmoTiers, olmo_tiers
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.repeated_loads import load_until_unchanged
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, KeyMismatchError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.probes.of_olmo import OLMO, OLMO_TIERS
from bytecheckpoint.probes.probe import require
from bytecheckpoint.runtime.patching import Replacing
from bytecheckpoint.storage.folders import can_open_url, folder_at, known
from bytecheckpoint.storage.paths import Place, TieredPath, below, location, parent_of
from bytecheckpoint.storage.tiers import Tiers

if TYPE_CHECKING:
    import os

    import torch.distributed as dist

__all__ = ["OlmoLoadPlanner", "OlmoReader", "OlmoWriter", "install", "installed", "uninstall"]

_PACKAGE = "olmo_core.distributed.checkpoint"
_MAX_IO_THREADS = 16  # the maximum of Config.io_threads
_MAX_NAMED = 8
# OLMo-core tells URLs from paths in this way.
_URL = re.compile(r"(?!file://)[a-z0-9]+://")

_replaced: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, OLMo-core's value, ours
_ours: dict[str, tuple[Any, Any]] = {}  # by name: OLMo-core's value, ours
_tiers: OlmoTiers | None = None


def install(
    *,
    allow_pickle: bool = False,
    config: Config | None = None,
    spec: LoadSpec | None = None,
    tiers: Tiers | Mapping[str, Any] | None = None,
) -> None:
    """Replaces OLMo-core's writer, reader and planners by ours.

    Local: it changes this process only. Call it once on every rank, before saving or loading. It stays until
    ``uninstall``; calling it again, or within a block of ``installed``, changes no settings.

    It changes all modules of OLMo-core that are loaded; modules that are loaded later import our classes from
    ``olmo_core.distributed.checkpoint``. A save that has begun keeps the classes that it began with. Where OLMo-core
    has a class derived from DCP's planner (``FlatSavePlanner`` of ``OLMoDDPTrainModule``), that planner is used with
    our writer.

    Args:
        allow_pickle: Whether to load objects that torch's ``weights_only`` rules refuse, as OLMo-core does. Loading may
            then run code of the checkpoint. The same as ``Config(allow_pickle=True)``.
        config: Settings of all writers, readers and planners; None reads ``BYTECHECKPOINT_*`` variables each time.
        spec: What loads take of a checkpoint, under which names, in which form; None takes it as it is. Pass it in a
            block of ``installed`` around a load: it holds for every load that OLMo-core begins there.
        tiers: Places of the run: ``Tiers``, or a dict of their arguments. The trainer's save folder is the near one, or
            the durable one if there is no near place. A step is copied on when OLMo-core has written all of it, with
            its own files; those are never in memory.

    Raises:
        UnsupportedError: OLMo-core is not installed, or not built as we need it. The message names the probe that
            failed. Nothing was changed.
        ConfigError: A ``BYTECHECKPOINT_*`` variable has a wrong value, which is raised here only with ``allow_pickle``;
            or ``spec``, or other ``tiers``, are passed while the classes are replaced already; or see ``Tiers``.
    """
    _replacing.install(allow_pickle=allow_pickle, config=config, spec=spec, tiers=tiers)


def uninstall() -> None:
    """Gives OLMo-core its own classes back when open blocks have ended. It has no effect without ``install``."""
    _replacing.uninstall()


@contextmanager
def installed(
    *,
    allow_pickle: bool = False,
    config: Config | None = None,
    spec: LoadSpec | None = None,
    tiers: Tiers | Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Acts like ``install`` for the duration of a ``with`` block. Blocks may overlap, as those of ``registered``.

    Args:
        allow_pickle: See ``install``.
        config: See ``install``.
        spec: See ``install``.
        tiers: See ``install``.
    """
    with _replacing.block(allow_pickle=allow_pickle, config=config, spec=spec, tiers=tiers):
        yield


def _replace(
    allow_pickle: bool, config: Config | None, spec: LoadSpec | None, tiers: Tiers | Mapping[str, Any] | None
) -> None:
    global _tiers
    if allow_pickle:
        config = dataclasses.replace(config or Config.from_env(), allow_pickle=True)
    if _replaced:
        if spec is not None:
            raise ConfigError("bytecheckpoint.olmo: a spec has no effect within install() or another block")
        if tiers is not None and (_tiers is None or Tiers.of(tiers) != _tiers.tiers):
            raise ConfigError("bytecheckpoint.olmo: tiers have no effect within install() or another block")
        return
    in_tiers = olmo_tiers(tiers, config)
    require(OLMO, anew=True)
    if in_tiers is not None:
        require(OLMO_TIERS, anew=True)
    package = import_module(_PACKAGE)
    ours: dict[str, Any] = {
        "RemoteFileSystemWriter": OlmoWriter if config is None else partial(OlmoWriter, config=config),
        "RemoteFileSystemReader": OlmoReader if config is None else partial(OlmoReader, config=config),
        "DefaultSavePlanner": BcpSavePlanner if config is None else partial(BcpSavePlanner, config=config),
        "dist_cp": _Dcp(package.dist_cp, spec, in_tiers),
    }
    if in_tiers is not None:
        ours["RemoteFileSystemReader"] = partial(_reader, in_tiers, ours["RemoteFileSystemReader"])
        in_tiers.follow()
        _tiers = in_tiers
    _ours.update((name, (getattr(package, name), value)) for name, value in ours.items())
    for module in _users():
        for name, (theirs, value) in _ours.items():
            if module.__dict__.get(name) is theirs:
                setattr(module, name, value)
                _replaced.append((module, name, theirs, value))


def _give_back() -> None:
    global _tiers
    if _tiers is not None:
        _tiers.leave()
        _tiers = None
    for module in _users():
        for name, (theirs, value) in _ours.items():
            if module.__dict__.get(name) is value:  # also in modules that were loaded in the meantime
                setattr(module, name, theirs)
    _replaced.clear()
    _ours.clear()


_replacing = Replacing(_replace, _give_back)


class OlmoWriter(BcpWriter):
    """A ``BcpWriter`` with the arguments of OLMo-core's ``RemoteFileSystemWriter``.

    Args:
        path: Directory, ``file://`` and a directory, or a URL of an object store. For a URL of another kind, or without
            obstore, the call returns an object of OLMo-core's own class.
        thread_count: Number of I/O threads, of which at most 16 are used; None takes ``config.io_threads``. Each rank
            writes one file in any case. In a store, ``config.store_concurrency`` counts instead.
        process_count: Ignored here: the threads that write are C++ and do not hold the GIL.
        process_group: Ignored here: ``dcp.save`` gets it, too.
        throttle_uploads: Used by OLMo-core's own class only. Otherwise use ``Config(write_bytes_per_s=...)``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables now.

    Raises:
        ValueError: ``thread_count`` is not positive.
    """

    def __new__(cls, path: str | os.PathLike[str] = "", *args: Any, config: Config | None = None, **kwargs: Any) -> Any:
        if _is_theirs(path):
            return import_module(f"{_PACKAGE}.filesystem").RemoteFileSystemWriter(path, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int | None = None,
        process_count: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        throttle_uploads: bool = False,
        *,
        config: Config | None = None,
    ) -> None:
        super().__init__(_local(path), config=_with_threads(config, thread_count))


class OlmoReader(BcpReader):
    """A ``BcpReader`` with the arguments of OLMo-core's ``RemoteFileSystemReader``.

    It also reads checkpoints that OLMo-core wrote. If there is no checkpoint at the path, ``read_metadata`` and loads
    raise a ``CheckpointNotFoundError``, which is a ``FileNotFoundError``, and say where there are checkpoints.

    Args:
        path: Directory, ``file://`` and a directory, or a URL of an object store. For a URL of another kind, or without
            obstore, the call returns an object of OLMo-core's own class.
        thread_count: Number of I/O threads, of which at most 16 are used; None takes ``config.io_threads``. In a store,
            ``config.store_concurrency`` counts instead.
        pre_download: Used by OLMo-core's own class only: our reader reads files where they are.
        work_dir: Used by OLMo-core's own class only: our reader caches nothing.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables now.

    Raises:
        ValueError: ``thread_count`` is not positive.
    """

    def __new__(cls, path: str | os.PathLike[str] = "", *args: Any, config: Config | None = None, **kwargs: Any) -> Any:
        if _is_theirs(path):
            return import_module(f"{_PACKAGE}.filesystem").RemoteFileSystemReader(path, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int | None = None,
        pre_download: bool = False,
        work_dir: str | os.PathLike[str] | None = None,
        config: Config | None = None,
    ) -> None:
        super().__init__(_local(path), config=_with_threads(config, thread_count))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata as ``BcpReader`` does; if there is no checkpoint, the error says where there are some."""
        try:
            return super().read_metadata(*args, **kwargs)
        except CheckpointNotFoundError as error:
            # Change the error itself: a load raises this object again where every rank gets it.
            error.args = (f"{error}{_where_instead(location(self.path), self.config)}",)
            raise


class OlmoLoadPlanner(BcpLoadPlanner):
    """A ``BcpLoadPlanner`` that says which argument of OLMo-core helps if keys do not match."""

    def create_local_plan(self) -> LoadPlan:
        """Makes the plan as ``BcpLoadPlanner`` does; if keys do not match, the error says what helps."""
        try:
            return super().create_local_plan()
        except KeyMismatchError as error:
            error.args = (f"{error}{self._what_to_do()}",)
            raise

    def _what_to_do(self) -> str:
        assert self.metadata is not None
        checkpoint = checkpoint_of(self.metadata)
        missing = [fqn for fqn in self.state_dict if not checkpoint.has(fqn)]
        stored = self.metadata.state_dict_metadata.keys()
        if all(fqn.startswith("optim.") for fqn in missing):
            if not any(fqn.startswith("optim.") for fqn in stored):
                return "; it has no optimizer state: load with optim=None, or Checkpointer.load(load_optim_state=False)"
            if all(fqn.startswith("optim.param_groups.") for fqn in missing):
                was_flat = "optim.param_groups.0.params" not in stored
                return (
                    f"; its optimizer state was saved with flatten_optimizer_state={was_flat}: load with the same value"
                )
        elif any(fqn.startswith("model.") for fqn in missing) and any(fqn.startswith("model.") for fqn in stored):
            others = [fqn for fqn in stored if fqn.startswith("model.") and fqn not in self.state_dict]
            if others:
                return (
                    f"; it has {_named(others)}, which this load does not ask for: if parameters were renamed, pass "
                    "key_mapping={current: stored} to load_model_and_optim_state"
                )
        return "; OLMo-core has no allow_partial_load: its train modules leave out what is missing if strict=False"


def _reader(tiers: OlmoTiers, made: Callable[..., Any], path: str | os.PathLike[str], **options: Any) -> Any:
    """Returns a reader of the nearest place that has a step."""
    return made((None if _is_theirs(path) else tiers.step_of(_local(path))) or path, **options)


class _Dcp:
    """DCP as OLMo-core's modules see it.

    A load through our reader gets our planner if it passes none. Saves and loads of steps in ``Tiers`` are our own.
    """

    def __init__(self, dcp: ModuleType, spec: LoadSpec | None, tiers: OlmoTiers | None) -> None:
        self._dcp = dcp
        self.state_dict_loader = _Loader(dcp.state_dict_loader, spec, tiers)
        self.state_dict_saver = dcp.state_dict_saver if tiers is None else _Saver(dcp.state_dict_saver, tiers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dcp, name)


class _Saver:
    def __init__(self, theirs: ModuleType, tiers: OlmoTiers) -> None:
        self._theirs = theirs
        self._tiers = tiers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def save(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        return self._saved(state_dict, kwargs, self._theirs.save, in_background=False)

    def async_save(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        return self._saved(state_dict, kwargs, self._theirs.async_save, in_background=True)

    def _saved(
        self, state: dict[str, Any], kwargs: dict[str, Any], save: Callable[..., Any], *, in_background: bool
    ) -> Any:
        writer = kwargs.get("storage_writer")
        if not isinstance(writer, OlmoWriter) or not self._tiers.takes(str(writer.path)):
            return save(state, **kwargs)
        return self._tiers.save(
            str(writer.path), state, in_background=in_background, **{**kwargs, "config": writer.config}
        )


class _Loader:
    def __init__(self, theirs: ModuleType, spec: LoadSpec | None, tiers: OlmoTiers | None) -> None:
        self._theirs = theirs
        self._spec = spec
        self._tiers = tiers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def load(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        reader = kwargs.get("storage_reader")
        load: Callable[..., None] = self._theirs.load
        if not isinstance(reader, OlmoReader) or kwargs.get("planner") is not None:
            load(state_dict, **kwargs)
            return
        spec = self._spec
        path = kwargs.get("checkpoint_id")
        step = None if self._tiers is None or path is None else self._tiers.step_of(_local(path))
        if self._tiers is not None and step is not None:
            self._tiers.load(
                step, state_dict, **{**kwargs, "planner": OlmoLoadPlanner(spec=spec), "config": reader.config}
            )
            return
        load_until_unchanged(lambda: load(state_dict, **{**kwargs, "planner": OlmoLoadPlanner(spec=spec)}), reader)


def _users() -> list[ModuleType]:
    """Returns the modules of OLMo-core that use the classes, except the one that defines them."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("olmo_core.")]
    names = ("RemoteFileSystemWriter", "RemoteFileSystemReader")
    return [
        module
        for module in modules
        if module.__name__ != f"{_PACKAGE}.filesystem" and any(name in module.__dict__ for name in names)
    ]


def _with_threads(config: Config | None, thread_count: int | None) -> Config:
    config = config or Config.from_env()
    if thread_count is None:
        return config
    if thread_count <= 0:
        raise ValueError(f"thread_count={thread_count}: it must be at least 1; None leaves it to Config.io_threads")
    return dataclasses.replace(config, io_threads=min(thread_count, _MAX_IO_THREADS), load_io_threads=0)


def _local(path: str | os.PathLike[str]) -> str | TieredPath:
    return path if isinstance(path, TieredPath) else str(path).removeprefix("file://")


def _is_theirs(path: str | os.PathLike[str]) -> bool:
    """Whether saves and loads at ``path`` are left to OLMo-core."""
    is_ours = can_open_url(str(path)) and folder_at(str(path)).has_listing
    return _URL.match(str(path)) is not None and not is_ours


def _where_instead(path: Place, config: Config) -> str:
    """Says what to load instead of ``path``, in the layout of OLMo-core's trainer: run/step10/model_and_optim."""
    known(parent_of(parent_of(path)), config)
    if folder_at(below(path, "model_and_optim")).has(".metadata"):
        return f"; did you mean {below(path, 'model_and_optim')}?"
    for run in (path, parent_of(path), parent_of(parent_of(path))):
        try:
            steps = sorted(
                (int(name[4:]), name)
                for name in folder_at(run).folders()
                if re.fullmatch(r"step\d+", name) and folder_at(below(run, name, "model_and_optim")).has(".metadata")
            )
        except CheckpointError:  # a folder above, which need not be there, or be known
            continue
        if steps:
            return f"; {run} has {_named([name for _, name in steps])}"
    return ""


def _named(names: list[str]) -> str:
    """Returns the last names in one text, and how many there are before them. The last steps are the newest."""
    more = f"{len(names) - _MAX_NAMED} more and " if len(names) > _MAX_NAMED else ""
    return more + ", ".join(names[-_MAX_NAMED:])

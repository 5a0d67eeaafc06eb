# SPDX-License-Identifier: Apache-2.0
"""OLMo-core's checkpoints through our writer, reader and planners.

``bytecheckpoint.olmo.install()``, and ``olmo_core.distributed.checkpoint`` and the trainer's ``Checkpointer`` use them
for everything that is at a local path. URLs stay with OLMo-core's own classes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint._replacing import Replacing
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._again import load_until_unchanged
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.errors import CheckpointNotFoundError, KeyMismatchError
from bytecheckpoint.probes.of_olmo import OLMO
from bytecheckpoint.probes.probe import require

if TYPE_CHECKING:
    import os

    import torch.distributed as dist

__all__ = ["OlmoLoadPlanner", "OlmoReader", "OlmoWriter", "install", "installed", "uninstall"]

_PACKAGE = "olmo_core.distributed.checkpoint"
_MAX_IO_THREADS = 16  # of Config.io_threads
_MAX_NAMED = 8
# As OLMo-core tells them from paths.
_URL = re.compile(r"(?!file://)[a-z0-9]+://")

_replaced: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, OLMo-core's own, ours
_ours: dict[str, tuple[Any, Any]] = {}  # by name: OLMo-core's own, ours


def install(*, allow_pickle: bool = False, config: Config | None = None) -> None:
    """Puts our writer, reader and planners where OLMo-core names its own.

    Local, and for this process alone; call it on every rank, once, before saving or loading. All modules of OLMo-core
    that are loaded get them, and those that are loaded later take them over from ``olmo_core.distributed.checkpoint``.
    Saves that have begun keep what they were begun with. Where a class derives from DCP's planner (``FlatSavePlanner``
    of ``OLMoDDPTrainModule``), that planner is used with our writer.

    It stays until ``uninstall``. Calling it again, or within a block of ``installed``, changes no settings.

    Args:
        allow_pickle: Load objects that torch's ``weights_only`` rules refuse, as OLMo-core does; loading may then run
            code of the checkpoint. As ``Config(allow_pickle=True)``.
        config: Settings of all writers, readers and planners; None reads ``BYTECHECKPOINT_*`` variables each time.

    Raises:
        UnsupportedError: OLMo-core is not installed, or built otherwise than it would have to be: names the probe.
            Nothing was changed.
        ConfigError: A ``BYTECHECKPOINT_*`` variable has a wrong value, with ``allow_pickle``.
    """
    _replacing.stay(allow_pickle=allow_pickle, config=config)


def uninstall() -> None:
    """Gives OLMo-core its own classes back, once open blocks have ended. No effect without ``install``."""
    _replacing.take_back()


@contextmanager
def installed(*, allow_pickle: bool = False, config: Config | None = None) -> Iterator[None]:
    """``install`` for the time of a ``with`` block, or of several that overlap, as ``bytecheckpoint.registered``."""
    with _replacing.block(allow_pickle=allow_pickle, config=config):
        yield


def _replace(allow_pickle: bool, config: Config | None) -> None:
    if allow_pickle:
        config = dataclasses.replace(config or Config.from_env(), allow_pickle=True)
    if _replaced:
        return
    require(OLMO, anew=True)
    package = import_module(_PACKAGE)
    ours: dict[str, Any] = {
        "RemoteFileSystemWriter": OlmoWriter if config is None else partial(OlmoWriter, config=config),
        "RemoteFileSystemReader": OlmoReader if config is None else partial(OlmoReader, config=config),
        "DefaultSavePlanner": BcpSavePlanner if config is None else partial(BcpSavePlanner, config=config),
        "dist_cp": _WithLoadPlanner(package.dist_cp),
    }
    _ours.update((name, (getattr(package, name), value)) for name, value in ours.items())
    for module in _users():
        for name, (theirs, value) in _ours.items():
            if module.__dict__.get(name) is theirs:
                setattr(module, name, value)
                _replaced.append((module, name, theirs, value))


def _give_back() -> None:
    for module in _users():
        for name, (theirs, value) in _ours.items():
            if module.__dict__.get(name) is value:  # also of modules that were loaded meanwhile
                setattr(module, name, theirs)
    _replaced.clear()
    _ours.clear()


_replacing = Replacing(_replace, _give_back)


class OlmoWriter(BcpWriter):
    """``BcpWriter`` with the arguments of OLMo-core's ``RemoteFileSystemWriter``, which a URL gives instead.

    Args:
        path: Directory, or ``file://`` and a directory; with another scheme the object is one of OLMo-core's own class.
        thread_count: I/O threads, 16 at most; None: ``config.io_threads``. Always one file a rank.
        process_count: Without meaning here: the threads that write are C++, and hold no lock of Python's.
        process_group: Without meaning here: ``dcp.save`` is given it, too.
        throttle_uploads: For URLs alone, as in OLMo-core. ``Config(write_bytes_per_s=...)`` throttles at local paths.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables now.

    Raises:
        ValueError: ``thread_count`` is not positive.
    """

    def __new__(cls, path: str | os.PathLike[str] = "", *args: Any, config: Config | None = None, **kwargs: Any) -> Any:
        if _URL.match(str(path)):
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
    """``BcpReader`` with the arguments of OLMo-core's ``RemoteFileSystemReader``, which a URL gives instead.

    It reads what OLMo-core wrote, as well.

    Args:
        path: Directory, or ``file://`` and a directory; with another scheme the object is one of OLMo-core's own class.
        thread_count: I/O threads, 16 at most; None: ``config.io_threads``.
        pre_download: For URLs alone: what is local is read where it is.
        work_dir: For URLs alone: nothing is cached.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables now.

    Raises:
        ValueError: ``thread_count`` is not positive.

    Where there is no checkpoint, ``read_metadata`` and loads raise a ``CheckpointNotFoundError``, which is a
    ``FileNotFoundError``, and say where there are some.
    """

    def __new__(cls, path: str | os.PathLike[str] = "", *args: Any, config: Config | None = None, **kwargs: Any) -> Any:
        if _URL.match(str(path)):
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
        """As ``BcpReader.read_metadata``."""
        try:
            return super().read_metadata(*args, **kwargs)
        except CheckpointNotFoundError as error:
            # The object itself: a load raises it again, where every rank gets it.
            error.args = (f"{error}{_where_instead(self.path)}",)
            raise


class OlmoLoadPlanner(BcpLoadPlanner):
    """``BcpLoadPlanner`` that says which argument of OLMo-core helps when keys do not match."""

    def create_local_plan(self) -> LoadPlan:
        """As ``BcpLoadPlanner.create_local_plan``."""
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
                return f"; its optimizer state was saved with flatten_optimizer_state={was_flat}: load with that, too"
        elif any(fqn.startswith("model.") for fqn in missing) and any(fqn.startswith("model.") for fqn in stored):
            others = [fqn for fqn in stored if fqn.startswith("model.") and fqn not in self.state_dict]
            if others:
                return (
                    f"; it has {_named(others)}, which nobody asks for: if parameters were renamed, "
                    "key_mapping={current: stored} of load_model_and_optim_state says how"
                )
        return "; OLMo-core has no allow_partial_load: its train modules leave out what is missing if strict=False"


class _WithLoadPlanner:
    """DCP as OLMo-core's modules see it: loads through our reader that name no planner get ours."""

    def __init__(self, dcp: ModuleType) -> None:
        self._dcp = dcp
        self.state_dict_loader = _Loader(dcp.state_dict_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dcp, name)


class _Loader:
    def __init__(self, theirs: ModuleType) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def load(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        reader = kwargs.get("storage_reader")
        load: Callable[..., None] = self._theirs.load
        if not isinstance(reader, OlmoReader) or kwargs.get("planner") is not None:
            load(state_dict, **kwargs)
            return
        load_until_unchanged(lambda: load(state_dict, **{**kwargs, "planner": OlmoLoadPlanner()}), reader)


def _users() -> list[ModuleType]:
    """Modules of OLMo-core that name the classes, other than the one that defines them."""
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


def _local(path: str | os.PathLike[str]) -> str:
    return str(path).removeprefix("file://")


def _where_instead(path: Path) -> str:
    """What to load rather than ``path``, in the layout of OLMo-core's trainer: run/step10/model_and_optim."""
    if (path / "model_and_optim" / ".metadata").is_file():
        return f"; did you mean {path / 'model_and_optim'}?"
    for run in (path, path.parent, path.parent.parent):
        steps = sorted(
            (int(folder.name[4:]), folder.name)
            for folder in run.glob("step*")
            if re.fullmatch(r"step\d+", folder.name) and (folder / "model_and_optim" / ".metadata").is_file()
        )
        if steps:
            return f"; {run} has {_named([name for _, name in steps])}"
    return ""


def _named(names: list[str]) -> str:
    """The last ones, which are the newest of steps."""
    more = f"{len(names) - _MAX_NAMED} more and " if len(names) > _MAX_NAMED else ""
    return more + ", ".join(names[-_MAX_NAMED:])

# SPDX-License-Identifier: Apache-2.0
"""A C++ checkpoint engine for ``torch.distributed.checkpoint``.

Use ``dcp.save(state, storage_writer=BcpWriter(path))`` and ``dcp.load(state, storage_reader=BcpReader(path))``;
everything else stays as it is. Importing the package imports neither torch nor the extension modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint import _reference_names

if TYPE_CHECKING:  # each name again as itself: so it is one of the package's own
    from bytecheckpoint.checkpoint.copying import CopyReport as CopyReport
    from bytecheckpoint.checkpoint.copying import copy_checkpoint as copy_checkpoint
    from bytecheckpoint.checkpoint.digests import Digest as Digest
    from bytecheckpoint.checkpoint.digests import digest as digest
    from bytecheckpoint.checkpoint.draining import DrainReport as DrainReport
    from bytecheckpoint.checkpoint.draining import drain as drain
    from bytecheckpoint.checkpoint.keeping import pin as pin
    from bytecheckpoint.checkpoint.keeping import unpin as unpin
    from bytecheckpoint.checkpoint.retention import Retention as Retention
    from bytecheckpoint.checkpoint.retention import RetentionReport as RetentionReport
    from bytecheckpoint.checkpoint.steps import scan_steps as scan_steps
    from bytecheckpoint.checkpoint.verification import verify as verify
    from bytecheckpoint.config import Config as Config
    from bytecheckpoint.contents.stored_state import StoredState as StoredState
    from bytecheckpoint.contents.stored_state import read as read
    from bytecheckpoint.dcp.load_planner import BcpLoadPlanner as BcpLoadPlanner
    from bytecheckpoint.dcp.reader import BcpReader as BcpReader
    from bytecheckpoint.dcp.save_planner import BcpSavePlanner as BcpSavePlanner
    from bytecheckpoint.dcp.stager import BcpStager as BcpStager
    from bytecheckpoint.dcp.writer import BcpWriter as BcpWriter
    from bytecheckpoint.errors import CheckpointError as CheckpointError
    from bytecheckpoint.groups import new_group as new_group
    from bytecheckpoint.journal.observers import observe as observe
    from bytecheckpoint.journal.observers import stop_observing as stop_observing
    from bytecheckpoint.load_spec.spec import LoadSpec as LoadSpec
    from bytecheckpoint.publishing.publisher import Publisher as Publisher
    from bytecheckpoint.publishing.publisher import PublishReport as PublishReport
    from bytecheckpoint.publishing.subscriber import Subscriber as Subscriber
    from bytecheckpoint.registration import register as register
    from bytecheckpoint.registration import registered as registered
    from bytecheckpoint.registration import unregister as unregister
    from bytecheckpoint.report import LoadReport as LoadReport
    from bytecheckpoint.report import PlanReport as PlanReport
    from bytecheckpoint.report import Problem as Problem
    from bytecheckpoint.report import RankLoadReport as RankLoadReport
    from bytecheckpoint.report import RankSaveReport as RankSaveReport
    from bytecheckpoint.report import SaveReport as SaveReport
    from bytecheckpoint.report import VerifyReport as VerifyReport
    from bytecheckpoint.staging.background import shutdown as shutdown
    from bytecheckpoint.staging.merging import merge as merge
    from bytecheckpoint.staging.merging import scatter as scatter
    from bytecheckpoint.staging.save_handle import SaveHandle as SaveHandle
    from bytecheckpoint.state_dicts import async_save_state_dict as async_save_state_dict
    from bytecheckpoint.state_dicts import load_state_dict as load_state_dict
    from bytecheckpoint.state_dicts import save_state_dict as save_state_dict
    from bytecheckpoint.storage.object_store.sweep import SweepReport as SweepReport
    from bytecheckpoint.storage.object_store.sweep import sweep as sweep
    from bytecheckpoint.storage.step_folder import StepFolder as StepFolder
    from bytecheckpoint.storage.tiers import MemoryTier as MemoryTier
    from bytecheckpoint.storage.tiers import Tiers as Tiers
    from bytecheckpoint.training_state.checkpoint_report import CheckpointReport as CheckpointReport
    from bytecheckpoint.training_state.checkpointers import DDPCheckpointer as DDPCheckpointer
    from bytecheckpoint.training_state.checkpointers import FSDP2Checkpointer as FSDP2Checkpointer
    from bytecheckpoint.training_state.checkpointers import FSDPCheckpointer as FSDPCheckpointer
    from bytecheckpoint.training_state.latest import latest as latest
    from bytecheckpoint.training_state.loading import LoadResult as LoadResult
    from bytecheckpoint.training_state.loading import load as load
    from bytecheckpoint.training_state.merging import (
        bytecheckpoint_ckpt_to_pytorch_ckpt as bytecheckpoint_ckpt_to_pytorch_ckpt,
    )
    from bytecheckpoint.training_state.resuming import Resumed as Resumed
    from bytecheckpoint.training_state.resuming import resume as resume
    from bytecheckpoint.training_state.rng_state import get_rng_state as get_rng_state
    from bytecheckpoint.training_state.rng_state import set_rng_state as set_rng_state
    from bytecheckpoint.training_state.saving import save as save
    from bytecheckpoint.training_state.tracker import find_latest_ckpt_path as find_latest_ckpt_path

__version__ = "0.1.0"

# The names of the package, by the module below it that has them. None is imported before somebody asks for it.
_NAMES = {
    "checkpoint.copying": "CopyReport copy_checkpoint",
    "checkpoint.digests": "Digest digest",
    "checkpoint.draining": "DrainReport drain",
    "checkpoint.keeping": "pin unpin",
    "checkpoint.retention": "Retention RetentionReport",
    "checkpoint.steps": "scan_steps",
    "checkpoint.verification": "verify",
    "config": "Config",
    "contents.stored_state": "StoredState read",
    "dcp.load_planner": "BcpLoadPlanner",
    "dcp.reader": "BcpReader",
    "dcp.save_planner": "BcpSavePlanner",
    "dcp.stager": "BcpStager",
    "dcp.writer": "BcpWriter",
    "errors": "CheckpointError",
    "groups": "new_group",
    "journal.observers": "observe stop_observing",
    "load_spec.spec": "LoadSpec",
    "publishing.publisher": "PublishReport Publisher",
    "publishing.subscriber": "Subscriber",
    "registration": "register registered unregister",
    "report": "LoadReport PlanReport Problem RankLoadReport RankSaveReport SaveReport VerifyReport",
    "staging.background": "shutdown",
    "staging.merging": "merge scatter",
    "staging.save_handle": "SaveHandle",
    "state_dicts": "async_save_state_dict load_state_dict save_state_dict",
    "storage.object_store.sweep": "SweepReport sweep",
    "storage.step_folder": "StepFolder",
    "storage.tiers": "MemoryTier Tiers",
    "training_state.checkpoint_report": "CheckpointReport",
    "training_state.checkpointers": "DDPCheckpointer FSDP2Checkpointer FSDPCheckpointer",
    "training_state.rng_state": "get_rng_state set_rng_state",
    "training_state.latest": "latest",
    "training_state.loading": "LoadResult load",
    "training_state.merging": "bytecheckpoint_ckpt_to_pytorch_ckpt",
    "training_state.resuming": "Resumed resume",
    "training_state.saving": "save",
    "training_state.tracker": "find_latest_ckpt_path",
}
# Names of earlier versions, and what does the same.
_GONE = {"prune": "use bytecheckpoint.Retention(run, keep_latest=...).prune()"}
_HOMES = {name: f"bytecheckpoint.{home}" for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOMES, "__version__", "build_info"])

# Public submodules. They are attributes of the package even if nobody has imported them.
_MODULES = (
    *("checkpoint", "config", "dcp", "errors", "groups", "observability"),
    *("model_specs", "registration", "report", "state_dicts", "transforms"),
)


_reference_names.install()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"bytecheckpoint.{name}")
    if name not in _HOMES:
        if name in _GONE:
            raise ImportError(f"bytecheckpoint.{name} is not here any more: {_GONE[name]}", name="bytecheckpoint")
        replaced = _reference_names.replacement_of(f"bytecheckpoint.{name}")
        if replaced is not None:
            raise ImportError(replaced, name="bytecheckpoint")
        raise AttributeError(f"module 'bytecheckpoint' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


def build_info() -> dict[str, Any]:
    """Describes this build as plain data.

    Returns:
        A dict with these keys. ``version``: version of the package. ``format_version``: version of the format that it
        writes. ``core`` and ``torch_extension``: compiler, C++ version and torch that each extension module was built
        for; ``torch_extension`` is None if it cannot be imported. ``torch``: version of torch that is installed, or
        None. ``cuda``: the device code that was compiled in, such as ``["sm_90", "compute_90"]``, or an empty list.
    """
    from importlib.metadata import PackageNotFoundError, version

    from bytecheckpoint.native import _core

    core = _core.build_info()
    try:
        torch_version: str | None = version("torch")
        import torch  # noqa: F401  # the extension links against it

        from bytecheckpoint.native import _C

        extension: dict[str, Any] | None = _C.build_info()
    except (ImportError, PackageNotFoundError):
        torch_version, extension = None, None
    return {
        "version": __version__,
        "format_version": core["format_version"],
        "core": core,
        "torch_extension": extension,
        "torch": torch_version,
        "cuda": extension["cuda"] if extension is not None else [],
    }

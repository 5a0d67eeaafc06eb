# SPDX-License-Identifier: Apache-2.0
"""A C++ checkpoint engine for ``torch.distributed.checkpoint``.

``dcp.save(state, storage_writer=BcpWriter(path))`` and ``dcp.load(state, storage_reader=BcpReader(path))``; everything
else stays as it is. Importing the package imports neither torch nor the extension modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytecheckpoint._background import shutdown
    from bytecheckpoint.config import Config
    from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
    from bytecheckpoint.dcp.reader import BcpReader
    from bytecheckpoint.dcp.save_planner import BcpSavePlanner
    from bytecheckpoint.dcp.stager import BcpStager
    from bytecheckpoint.dcp.writer import BcpWriter
    from bytecheckpoint.errors import CheckpointError
    from bytecheckpoint.frameworks.checkpointers import DDPCheckpointer, FSDP2Checkpointer, FSDPCheckpointer
    from bytecheckpoint.frameworks.conversion import bytecheckpoint_ckpt_to_pytorch_ckpt
    from bytecheckpoint.frameworks.extra_state import get_rng_state, set_rng_state
    from bytecheckpoint.frameworks.loading import LoadResult, load
    from bytecheckpoint.frameworks.saving import CheckpointReport, save
    from bytecheckpoint.frameworks.tracker import find_latest_ckpt_path
    from bytecheckpoint.groups import new_group
    from bytecheckpoint.merging import merge, scatter
    from bytecheckpoint.newest import latest
    from bytecheckpoint.registration import register, registered, unregister
    from bytecheckpoint.report import (
        LoadReport,
        PlanReport,
        Problem,
        RankLoadReport,
        RankSaveReport,
        SaveReport,
        VerifyReport,
    )
    from bytecheckpoint.retention import Retention, RetentionReport, prune
    from bytecheckpoint.save_handle import SaveHandle
    from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict, save_state_dict
    from bytecheckpoint.steps import StepFolder, scan_steps
    from bytecheckpoint.verification import verify

__version__ = "0.1.0"

__all__ = [
    "BcpLoadPlanner",
    "BcpReader",
    "BcpSavePlanner",
    "BcpStager",
    "BcpWriter",
    "CheckpointError",
    "CheckpointReport",
    "Config",
    "DDPCheckpointer",
    "FSDP2Checkpointer",
    "FSDPCheckpointer",
    "LoadReport",
    "LoadResult",
    "PlanReport",
    "Problem",
    "RankLoadReport",
    "RankSaveReport",
    "Retention",
    "RetentionReport",
    "SaveHandle",
    "SaveReport",
    "StepFolder",
    "VerifyReport",
    "__version__",
    "async_save_state_dict",
    "build_info",
    "bytecheckpoint_ckpt_to_pytorch_ckpt",
    "find_latest_ckpt_path",
    "get_rng_state",
    "latest",
    "load",
    "load_state_dict",
    "merge",
    "new_group",
    "prune",
    "register",
    "registered",
    "save",
    "save_state_dict",
    "scan_steps",
    "scatter",
    "set_rng_state",
    "shutdown",
    "unregister",
    "verify",
]

_HOMES = {
    "BcpLoadPlanner": "bytecheckpoint.dcp.load_planner",
    "BcpReader": "bytecheckpoint.dcp.reader",
    "BcpSavePlanner": "bytecheckpoint.dcp.save_planner",
    "BcpStager": "bytecheckpoint.dcp.stager",
    "BcpWriter": "bytecheckpoint.dcp.writer",
    "CheckpointError": "bytecheckpoint.errors",
    "CheckpointReport": "bytecheckpoint.frameworks.saving",
    "Config": "bytecheckpoint.config",
    "DDPCheckpointer": "bytecheckpoint.frameworks.checkpointers",
    "FSDP2Checkpointer": "bytecheckpoint.frameworks.checkpointers",
    "FSDPCheckpointer": "bytecheckpoint.frameworks.checkpointers",
    "LoadReport": "bytecheckpoint.report",
    "LoadResult": "bytecheckpoint.frameworks.loading",
    "PlanReport": "bytecheckpoint.report",
    "Problem": "bytecheckpoint.report",
    "RankLoadReport": "bytecheckpoint.report",
    "RankSaveReport": "bytecheckpoint.report",
    "Retention": "bytecheckpoint.retention",
    "RetentionReport": "bytecheckpoint.retention",
    "SaveHandle": "bytecheckpoint.save_handle",
    "SaveReport": "bytecheckpoint.report",
    "StepFolder": "bytecheckpoint.steps",
    "VerifyReport": "bytecheckpoint.report",
    "async_save_state_dict": "bytecheckpoint.state_dicts",
    "bytecheckpoint_ckpt_to_pytorch_ckpt": "bytecheckpoint.frameworks.conversion",
    "find_latest_ckpt_path": "bytecheckpoint.frameworks.tracker",
    "get_rng_state": "bytecheckpoint.frameworks.extra_state",
    "latest": "bytecheckpoint.newest",
    "load": "bytecheckpoint.frameworks.loading",
    "load_state_dict": "bytecheckpoint.state_dicts",
    "merge": "bytecheckpoint.merging",
    "new_group": "bytecheckpoint.groups",
    "prune": "bytecheckpoint.retention",
    "register": "bytecheckpoint.registration",
    "registered": "bytecheckpoint.registration",
    "save": "bytecheckpoint.frameworks.saving",
    "save_state_dict": "bytecheckpoint.state_dicts",
    "scan_steps": "bytecheckpoint.steps",
    "scatter": "bytecheckpoint.merging",
    "set_rng_state": "bytecheckpoint.frameworks.extra_state",
    "shutdown": "bytecheckpoint._background",
    "unregister": "bytecheckpoint.registration",
    "verify": "bytecheckpoint.verification",
}


# Public submodules, which are attributes without an import of their own.
_MODULES = (
    "config",
    "dcp",
    "errors",
    "frameworks",
    "groups",
    "merging",
    "registration",
    "report",
    "retention",
    "save_handle",
    "state_dicts",
    "steps",
    "verification",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"bytecheckpoint.{name}")
    if name in ("_C", "_core"):  # asked for by `from bytecheckpoint import _C`, before it is looked for as a module
        from bytecheckpoint._extensions import extension

        return extension(name)
    if name not in _HOMES:
        raise AttributeError(f"module 'bytecheckpoint' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


def build_info() -> dict[str, Any]:
    """What is in this build, as plain data.

    Returns:
        ``version`` of the package, ``format_version`` of the checkpoints it writes, ``core`` and ``torch_extension``
        with compiler, C++ version and torch that each extension module was built for (``None`` for one that cannot be
        imported), ``torch`` that is installed, and ``cuda``: what device code was compiled in, such as
        ``["sm_90", "compute_90"]``, or an empty list.
    """
    from importlib.metadata import PackageNotFoundError, version

    from bytecheckpoint import _core

    core = _core.build_info()
    try:
        torch_version: str | None = version("torch")
        import torch  # noqa: F401  # the extension links against it

        from bytecheckpoint import _C

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

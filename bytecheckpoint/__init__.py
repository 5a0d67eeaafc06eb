# SPDX-License-Identifier: Apache-2.0
"""A C++ checkpoint engine for ``torch.distributed.checkpoint``.

Use ``dcp.save(state, storage_writer=BcpWriter(path))`` and ``dcp.load(state, storage_reader=BcpReader(path))``;
everything else stays as it is. Importing the package imports neither torch nor the extension modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint import _reference_names

if TYPE_CHECKING:
    from bytecheckpoint.checkpoint.digests import Digest, digest
    from bytecheckpoint.checkpoint.retention import Retention, RetentionReport, prune
    from bytecheckpoint.checkpoint.steps import StepFolder, scan_steps
    from bytecheckpoint.checkpoint.store_sweep import SweepReport, sweep
    from bytecheckpoint.checkpoint.verification import verify
    from bytecheckpoint.config import Config
    from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
    from bytecheckpoint.dcp.reader import BcpReader
    from bytecheckpoint.dcp.save_planner import BcpSavePlanner
    from bytecheckpoint.dcp.stager import BcpStager
    from bytecheckpoint.dcp.writer import BcpWriter
    from bytecheckpoint.errors import CheckpointError
    from bytecheckpoint.groups import new_group
    from bytecheckpoint.load_spec.spec import LoadSpec
    from bytecheckpoint.observability.observers import observe, stop_observing
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
    from bytecheckpoint.staging.background import shutdown
    from bytecheckpoint.staging.merging import merge, scatter
    from bytecheckpoint.staging.save_handle import SaveHandle
    from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict, save_state_dict
    from bytecheckpoint.training_state.checkpointers import DDPCheckpointer, FSDP2Checkpointer, FSDPCheckpointer
    from bytecheckpoint.training_state.extra_state import get_rng_state, set_rng_state
    from bytecheckpoint.training_state.latest import latest
    from bytecheckpoint.training_state.loading import LoadResult, load
    from bytecheckpoint.training_state.merging import bytecheckpoint_ckpt_to_pytorch_ckpt
    from bytecheckpoint.training_state.saving import CheckpointReport, save
    from bytecheckpoint.training_state.tracker import find_latest_ckpt_path

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
    "Digest",
    "FSDP2Checkpointer",
    "FSDPCheckpointer",
    "LoadReport",
    "LoadResult",
    "LoadSpec",
    "PlanReport",
    "Problem",
    "RankLoadReport",
    "RankSaveReport",
    "Retention",
    "RetentionReport",
    "SaveHandle",
    "SaveReport",
    "StepFolder",
    "SweepReport",
    "VerifyReport",
    "__version__",
    "async_save_state_dict",
    "build_info",
    "bytecheckpoint_ckpt_to_pytorch_ckpt",
    "digest",
    "find_latest_ckpt_path",
    "get_rng_state",
    "latest",
    "load",
    "load_state_dict",
    "merge",
    "new_group",
    "observe",
    "prune",
    "register",
    "registered",
    "save",
    "save_state_dict",
    "scan_steps",
    "scatter",
    "set_rng_state",
    "shutdown",
    "stop_observing",
    "sweep",
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
    "CheckpointReport": "bytecheckpoint.training_state.saving",
    "Config": "bytecheckpoint.config",
    "DDPCheckpointer": "bytecheckpoint.training_state.checkpointers",
    "Digest": "bytecheckpoint.checkpoint.digests",
    "FSDP2Checkpointer": "bytecheckpoint.training_state.checkpointers",
    "FSDPCheckpointer": "bytecheckpoint.training_state.checkpointers",
    "LoadReport": "bytecheckpoint.report",
    "LoadResult": "bytecheckpoint.training_state.loading",
    "LoadSpec": "bytecheckpoint.load_spec.spec",
    "PlanReport": "bytecheckpoint.report",
    "Problem": "bytecheckpoint.report",
    "RankLoadReport": "bytecheckpoint.report",
    "RankSaveReport": "bytecheckpoint.report",
    "Retention": "bytecheckpoint.checkpoint.retention",
    "RetentionReport": "bytecheckpoint.checkpoint.retention",
    "SaveHandle": "bytecheckpoint.staging.save_handle",
    "SaveReport": "bytecheckpoint.report",
    "StepFolder": "bytecheckpoint.checkpoint.steps",
    "VerifyReport": "bytecheckpoint.report",
    "async_save_state_dict": "bytecheckpoint.state_dicts",
    "bytecheckpoint_ckpt_to_pytorch_ckpt": "bytecheckpoint.training_state.merging",
    "digest": "bytecheckpoint.checkpoint.digests",
    "find_latest_ckpt_path": "bytecheckpoint.training_state.tracker",
    "get_rng_state": "bytecheckpoint.training_state.extra_state",
    "latest": "bytecheckpoint.training_state.latest",
    "load": "bytecheckpoint.training_state.loading",
    "load_state_dict": "bytecheckpoint.state_dicts",
    "merge": "bytecheckpoint.staging.merging",
    "new_group": "bytecheckpoint.groups",
    "observe": "bytecheckpoint.observability.observers",
    "prune": "bytecheckpoint.checkpoint.retention",
    "register": "bytecheckpoint.registration",
    "registered": "bytecheckpoint.registration",
    "save": "bytecheckpoint.training_state.saving",
    "save_state_dict": "bytecheckpoint.state_dicts",
    "scan_steps": "bytecheckpoint.checkpoint.steps",
    "SweepReport": "bytecheckpoint.checkpoint.store_sweep",
    "stop_observing": "bytecheckpoint.observability.observers",
    "sweep": "bytecheckpoint.checkpoint.store_sweep",
    "scatter": "bytecheckpoint.staging.merging",
    "set_rng_state": "bytecheckpoint.training_state.extra_state",
    "shutdown": "bytecheckpoint.staging.background",
    "unregister": "bytecheckpoint.registration",
    "verify": "bytecheckpoint.checkpoint.verification",
}


# Public submodules. They are attributes of the package even if nobody has imported them.
_MODULES = (
    *("checkpoint", "config", "dcp", "errors", "groups", "observability"),
    *("registration", "report", "state_dicts", "transforms"),
)


_reference_names.install()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"bytecheckpoint.{name}")
    if name not in _HOMES:
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

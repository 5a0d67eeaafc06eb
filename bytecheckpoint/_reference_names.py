# SPDX-License-Identifier: Apache-2.0
"""The modules that scripts of ByteCheckpoint import: their public names work, and others say what replaces them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["REPLACED", "WORKING", "install", "replacement_of"]

_PACKAGE = "bytecheckpoint."
_MERGE = "bytecheckpoint_ckpt_to_pytorch_ckpt"

# Each module of ByteCheckpoint 0.0.x of which names work here, and these names; all are names of the package.
WORKING: dict[str, tuple[str, ...]] = {
    "bytecheckpoint.api": (),
    "bytecheckpoint.api.load": ("load",),
    "bytecheckpoint.api.save": ("save",),
    "bytecheckpoint.checkpointer": (),
    "bytecheckpoint.checkpointer.ddp_checkpointer": ("DDPCheckpointer",),
    "bytecheckpoint.checkpointer.fsdp2_checkpointer": ("FSDP2Checkpointer",),
    "bytecheckpoint.checkpointer.fsdp_checkpointer": ("FSDPCheckpointer",),
    "bytecheckpoint.utilities": (),
    "bytecheckpoint.utilities.ckpt_format": (_MERGE,),
    "bytecheckpoint.utilities.ckpt_format.common_utils": ("find_latest_ckpt_path",),
    "bytecheckpoint.utilities.ckpt_format.merge_tool": (_MERGE,),
}

# Names and modules that scripts look for, without leading underscores, and what does the same here.
REPLACED = {
    "bytecheckpoint_cleanup_shm_ckpt_dir": "leave it out: no save leaves files in /dev/shm",
    "check_ckpt_is_bytecheckpoint": "use bytecheckpoint.scan_steps(run), which says what each step folder is",
    "ckpt_loader": "use bytecheckpoint.load_state_dict, or BcpReader with dcp.load",
    "distcp_load_tool": "use bytecheckpoint.load_state_dict, or BcpReader with dcp.load",
    "hf_to_bcp": "load the folder of Hugging Face itself: bytecheckpoint.load_state_dict(folder, state)",
    "load_hf_checkpoint_to_state_dict": "use bytecheckpoint.load_state_dict(folder, state)",
    "merge_bcp": f"run 'bcp convert STEP/model TARGET', or call bytecheckpoint.{_MERGE}",
    "model_optimizer_completeness": "use bytecheckpoint.scan_steps(run) or bytecheckpoint.verify(path)",
    "modify_key": "pass LoadSpec(rename=...) to the load, or run 'bcp convert SOURCE TARGET --rename OLD=NEW'",
    "safetensors_utils": "run 'bcp convert SOURCE TARGET', which writes safetensors with an index",
    "save_sharded_hf_checkpoint": "run 'bcp convert SOURCE TARGET', which writes safetensors with an index",
    "server_lib": "leave it out: ranks talk over torch.distributed",
    "store_engine": "bytecheckpoint.shutdown() waits for saves in the background",
}
# Packages of ByteCheckpoint of which nothing is here. Of ``storage`` only the name is: ours is another one.
_ABSENT = frozenset({"engine", "io", "planner", "storage", "workflow", "scripts", "tools"})


def replacement_of(name: str) -> str | None:
    """Returns the message of the ImportError for ``name``, a module or a name in one; None for a name of nobody's."""
    last = name.rpartition(".")[2].lstrip("_")
    if last not in REPLACED:
        return None
    return f"{name} is of ByteCheckpoint 0.0.x and not of this package: {REPLACED[last]}"


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGE):
            return None
        if fullname in WORKING:
            return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in WORKING))
        within = fullname.rpartition(".")[0]
        top = fullname.split(".")[1]
        is_theirs = within in WORKING or top in _ABSENT or (within == "bytecheckpoint" and top in REPLACED)
        if not is_theirs:
            return None
        if within == f"{_PACKAGE}storage":  # ours: a name that is missing there is no module, but a typo or theirs
            raise ImportError(replacement_of(fullname) or _unknown(fullname), name=fullname)
        # A package without anything leads on to the names in it, of which some have a replacement.
        if replacement_of(fullname) is None and top in _ABSENT:
            return ModuleSpec(fullname, self, is_package=True)
        raise ModuleNotFoundError(replacement_of(fullname) or _unknown(fullname), name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name, "Stands for a module of ByteCheckpoint 0.0.x.")
        names = WORKING.get(spec.name, ())

        def find(name: str) -> Any:
            if name in names:
                warnings.warn(
                    f"{spec.name}.{name} is bytecheckpoint.{name} here: import it from there",
                    DeprecationWarning,
                    stacklevel=3,
                )
                return getattr(import_module("bytecheckpoint"), name)
            if name.startswith("__"):
                raise AttributeError(f"module {spec.name!r} has no attribute {name!r}")
            raise ImportError(replacement_of(f"{spec.name}.{name}") or _unknown(f"{spec.name}.{name}"), name=spec.name)

        module.__dict__["__getattr__"] = find
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: ``create_module`` has filled the module already."""


def _unknown(name: str) -> str:
    return (
        f"{name} is not a name of this package; if it is of ByteCheckpoint 0.0.x, see 'Migration from ByteCheckpoint' "
        "in docs/training_state.md"
    )


def install() -> None:
    """Makes the modules importable. What this package has itself, such as its ``storage``, is found first."""
    sys.meta_path.append(_Finder())

# SPDX-License-Identifier: Apache-2.0
"""Makes run folders as ByteCheckpoint 0.0.2 and 0.0.3 leave them."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["save_as_reference"]

_MODULE = "bytecheckpoint.checkpointer.meta_type"


class Metadata:
    """Stands for the class of ByteCheckpoint 0.0.x. Its pickle holds the name of the class first, then the fields."""

    def __init__(self) -> None:
        self.state_dict_metadata = {"weight": None}
        self.bytecheckpoint_version = "0.0.3"


def save_as_reference(root: Path, step: int, protocol: int = 4) -> Path:
    """Makes one step, with the file names and first bytes of ByteCheckpoint 0.0.x, and returns its folder."""
    folder = root / f"global_step_{step}"
    with pytest.MonkeyPatch.context() as patch:
        module = ModuleType(_MODULE)
        module.Metadata = Metadata  # type: ignore[attr-defined]
        patch.setitem(sys.modules, _MODULE.rpartition(".")[0], ModuleType(_MODULE.rpartition(".")[0]))
        patch.setitem(sys.modules, _MODULE, module)
        patch.setattr(Metadata, "__module__", _MODULE)
        mark = pickle.dumps(Metadata(), protocol)
    for part in ("model", "optimizer"):
        (folder / part).mkdir(parents=True)
        (folder / part / ".metadata").write_bytes(mark)
        (folder / part / "__0_0.distcp").write_bytes(bytes(100))
    (folder / "extra_state").mkdir()
    (folder / "extra_state" / "extra_state_rank_0.pt").write_bytes(b"PK")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder

# SPDX-License-Identifier: Apache-2.0
"""Makes run folders of ByteCheckpoint 0.0.2, which it wrote itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.goldens import GOLDEN as GOLDENS

__all__ = ["save_as_reference"]

_GOLDEN = GOLDENS / "reference" / "ddp_1"


def save_as_reference(root: Path, step: int) -> Path:
    """Makes one step and its tracker, and returns its folder."""
    shutil.copytree(_GOLDEN / "global_step_7", root / f"global_step_{step}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return root / f"global_step_{step}"

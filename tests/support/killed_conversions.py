# SPDX-License-Identifier: Apache-2.0
"""Conversions that are killed in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SHARD_BYTES", "kill_a_conversion"]

SHARD_BYTES = 100
"""Of the files that it writes: ``shard_size``, to go on."""

_KILLED = """
import json, os, sys
from bytecheckpoint import LoadSpec
from bytecheckpoint.convert import convert
from bytecheckpoint.convert.dcp_target import Share
from bytecheckpoint.convert.safetensors_target import OutputFile
source, target, to, include, shard_size, verify = sys.argv[1:]
piece = OutputFile if to == "safetensors" else Share
write, left = piece.write, [2]
def dying(*args):
    if not left[0]:
        os.kill(os.getpid(), 9)
    left[0] -= 1
    write(*args)
piece.write = dying
spec = LoadSpec(include=json.loads(include)) if include != "[]" else None
convert(source, target, to=to, shard_size=int(shard_size), spec=spec, verify=verify == "True")
"""


def kill_a_conversion(
    source: Path, target: Path, to: str = "safetensors", include: Sequence[str] = (), *, verify: bool = True
) -> None:
    """Converts ``source`` in a process of its own that is killed when it has written two files of several."""
    command = [sys.executable, "-c", _KILLED, source, target, to, json.dumps([*include]), str(SHARD_BYTES), str(verify)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not target.exists()

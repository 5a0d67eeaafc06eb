# SPDX-License-Identifier: Apache-2.0
"""Starts a script again on two ranks, as ``torchrun --nproc-per-node 2`` does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def on_two_ranks(script: str, job: Callable[[Path], None]) -> None:
    """Calls ``job`` on each rank. Exits with the ranks' status.

    Args:
        script: The calling script. Its argument is a folder to keep; without one it uses a temporary folder.
        job: Called with the folder.
    """
    if "RANK" in os.environ:
        job(Path(sys.argv[1]))
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
        environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
        ranks = subprocess.run([*launch, *(sys.argv[1:] or [folder])], env=environ, check=False)
    sys.exit(ranks.returncode)

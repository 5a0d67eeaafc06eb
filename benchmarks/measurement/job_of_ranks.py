# SPDX-License-Identifier: Apache-2.0
"""Starts all ranks of a job at once, as a launcher does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

__all__ = ["run_job"]


def run_job(arguments: list[str], num_ranks: int) -> None:
    """Runs the script with these arguments as each of the ranks, which meet over loopback.

    Raises:
        SystemExit: A rank failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, *arguments]
    ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(num_ranks)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}: {' '.join(arguments)}")

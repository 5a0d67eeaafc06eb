# SPDX-License-Identifier: Apache-2.0
"""Makes system calls of a running process fail."""

from __future__ import annotations

import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.fork_server import LIMIT_S

__all__ = ["injected"]


@contextmanager
def injected(
    pid: int, log: Path, calls: str, error: str, when: int = 1, *, all_threads: bool = False, path: Path | None = None
) -> Iterator[None]:
    """Lets the ``when``-th of each of ``calls`` return ``error`` without being made, while the context lasts.

    Skips the test, with the reason, where strace is missing or may not trace.

    Args:
        calls: Names of system calls, with commas. Each is counted by itself, in each thread by itself.
        all_threads: Also those that begin later; else only the thread of the process that has its id.
        path: Count only calls on this file.
    """
    program = shutil.which("strace")
    if program is None:
        pytest.skip("ERRORS OF CALLS NOT TESTED: strace is not installed (apt-get install strace)")
    follow = ["-f"] if all_threads else []
    only = ["-P", str(path)] if path else []
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:error={error}:when={when}"]
    tracer = subprocess.Popen(
        [program, *follow, *only, "-y", "-o", str(log), *inject, "-p", str(pid)], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    with tracer, tracer.stderr as messages:
        try:
            readable, _, _ = select.select([messages], [], [], LIMIT_S)
            first = messages.readline() if readable else "it says nothing"
            if "attached" not in first:
                pytest.skip(f"ERRORS OF CALLS NOT TESTED: {first.strip()}")
            yield
        finally:
            tracer.terminate()  # lets go of the process
            tracer.wait(LIMIT_S)

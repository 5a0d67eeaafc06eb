# SPDX-License-Identifier: Apache-2.0
"""Runs blocks of a page one after the other, as a reader would type them.

Python blocks share the names of ``__main__``. ``bcp`` must print what the page shows.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snippets import Snippet, snippets_of

__all__ = ["run"]


def _run_ranks(snippet: Snippet) -> None:
    Path(snippet.script).write_text(snippet.code, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={snippet.num_ranks}"]
    subprocess.run([*launch, snippet.script], check=True)


def _run_commands(snippet: Snippet) -> None:
    commands = [block.partition("\n") for block in snippet.code.removeprefix("$ ").split("\n$ ")]
    for command, _, shown in commands:
        program, *arguments = shlex.split(command)
        assert program == "bcp", f"{command}: only bcp is run"
        wanted = shown.splitlines()
        if "..." in wanted:  # the page shows a part of the output, which differs by machine
            continue
        ran = subprocess.run([sys.executable, "-m", "bytecheckpoint", *arguments], stdout=subprocess.PIPE, text=True)
        # The page shows checkpoints below /mnt.
        printed = ran.stdout.replace(str(Path.cwd()), "/mnt")
        assert printed.splitlines() == wanted, f"{command} printed\n{printed}"


def run(page: str, lines: Sequence[str], names: dict[str, Any]) -> None:
    """Runs the blocks of a page that begin in ``lines``; those of Python with ``names``."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    for snippet in snippets_of(Path(page)):
        if str(snippet.line) not in lines:
            continue
        print(f"--- {snippet.page.name}, line {snippet.line}", flush=True)
        if snippet.num_ranks:
            _run_ranks(snippet)
        elif snippet.language == "console":
            _run_commands(snippet)
        else:
            code = "\n" * (snippet.line - 1) + snippet.code  # so that a traceback shows line numbers of the page
            exec(compile(code, str(snippet.page), "exec"), names)

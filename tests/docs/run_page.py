# SPDX-License-Identifier: Apache-2.0
"""Runs blocks of a page one after the other, as a reader would type them: ``run_page.py PAGE LINE...``.

Python blocks share the names of ``__main__``. ``bcp`` must print what the page shows.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from snippets import Snippet, snippets_of


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


def _main() -> None:
    page, *lines = sys.argv[1:]
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
            exec(compile(code, str(snippet.page), "exec"), globals())


if __name__ == "__main__":
    _main()

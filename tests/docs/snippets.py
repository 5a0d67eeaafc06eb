# SPDX-License-Identifier: Apache-2.0
"""Finds the snippets of a page: fenced blocks of Python, of commands with their output, and of what is not run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Snippet", "json_of", "snippets_of"]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TORCHRUN = re.compile(r"# torchrun --nproc-per-node=(\d+) (\w+\.py)\n")
_NEEDS = re.compile(r"# needs (\w+)\n")
# What is for another program than ours, and is only shown.
_NOT_RUN = ("json", "text")


@dataclass(frozen=True)
class Snippet:
    """One block.

    Attributes:
        page: File that contains it.
        line: Number of its first line there, from 1.
        language: ``python`` or ``console``.
        code: Its text.
        num_ranks: Number of ranks, if it is a script of its own. 0: it continues the blocks before it.
        script: Name of that script.
        needs: Package that it needs. It runs by itself, and only where this package is installed.
    """

    page: Path
    line: int
    language: str
    code: str
    num_ranks: int = 0
    script: str = ""
    needs: str = ""


def snippets_of(page: Path) -> list[Snippet]:
    """Returns the blocks of a page that are run, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _FENCED.finditer(text):
        language, code = block.groups()
        if language in _NOT_RUN:
            continue
        line = text.count("\n", 0, block.start(2)) + 1
        torchrun, needs = _TORCHRUN.match(code), _NEEDS.match(code)
        if torchrun is not None:
            found.append(Snippet(page, line, language, code, int(torchrun[1]), torchrun[2]))
        else:
            found.append(Snippet(page, line, language, code, needs="" if needs is None else needs[1]))
    return found


def json_of(page: Path) -> list[str]:
    """Returns the blocks of JSON of a page."""
    return [code for language, code in _FENCED.findall(page.read_text(encoding="utf-8")) if language == "json"]

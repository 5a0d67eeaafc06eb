# SPDX-License-Identifier: Apache-2.0
"""Every snippet of README.md and docs/ is complete, and does what the page says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from snippets import PAGES, ROOT, Snippet, snippets_of

LIMIT_S = 150.0
# By the package that a snippet may need: what the skip says without it.
NOT_TESTED = {
    "olmo_core": "OLMo-core is not installed: pip install ai2-olmo-core==3.0.0",
    "torchtitan": "torchtitan is not installed: ITS SNIPPET IS NOT TESTED",
}


def run(snippets: Sequence[Snippet], folder: Path) -> str:
    """Returns what the snippets of one page print, run in ``folder``. Their processes are gone when this returns."""
    page = snippets[0].page
    lines = [str(snippet.line) for snippet in snippets]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BYTECHECKPOINT_")}
    runner = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("run_page.py")), str(page), *lines],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        out, _ = runner.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(runner.pid, signal.SIGKILL)
        out, _ = runner.communicate()
        raise AssertionError(f"not done after {LIMIT_S:g} s:\n{out}") from None
    assert runner.returncode == 0, out
    return out


def with_snippets(needs: bool) -> list[object]:
    found = [(page, [s for s in snippets_of(page) if bool(s.needs) is needs]) for page in PAGES]
    return [pytest.param(snippets, id=page.name) for page, snippets in found if snippets]


@pytest.mark.parametrize("snippets", with_snippets(needs=False))
def test_snippets_run_in_their_order(snippets: list[Snippet], tmp_path: Path) -> None:
    run(snippets, tmp_path)


@pytest.mark.parametrize("name", NOT_TESTED)
def test_snippets_that_need_a_package(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(NOT_TESTED[name])
    snippets = [snippet for page in PAGES for snippet in snippets_of(page) if snippet.needs == name]
    assert snippets
    run(snippets, tmp_path)


def test_the_quickstart_resumes(tmp_path: Path) -> None:
    (script,) = [snippet for snippet in snippets_of(ROOT / "README.md") if snippet.num_ranks]
    assert "begins at step 0\n" in run([script], tmp_path)
    assert "begins at step 20\n" in run([script], tmp_path)
    assert sorted(folder.name for folder in (tmp_path / "run").iterdir()) == ["step-30", "step-40"]


def test_every_block_is_of_a_language_that_is_run() -> None:
    snippets = [snippet for page in PAGES for snippet in snippets_of(page)]
    assert {snippet.language for snippet in snippets} == {"python", "console"}
    assert {snippet.needs for snippet in snippets} == {"", *NOT_TESTED}
    # A first line that looks like a marker must be one that is understood.
    for snippet in snippets:
        first = snippet.code.partition("\n")[0]
        is_marked = bool(snippet.num_ranks or snippet.needs)
        assert is_marked or not first.startswith(("# torchrun", "# needs")), f"{snippet.page}:{snippet.line}: {first}"

# SPDX-License-Identifier: Apache-2.0
"""Every snippet of README.md and docs/ is complete, and does what the page says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from snippets import PAGES, ROOT, Snippet, snippets_of
from support.ending_ranks import EndingRanks, run_script

LIMIT_S = 150.0
# By the package that a snippet may need: what the skip says without it.
NOT_TESTED = {
    "accelerate": "accelerate is not installed: ITS SNIPPET IS NOT TESTED",
    "lightning": "lightning is not installed: ITS SNIPPET IS NOT TESTED",
    "megatron": "megatron-core is not installed: its snippets are run by hand",
    "olmo_core": "OLMo-core is not installed: pip install ai2-olmo-core==3.0.0",
    "torch_checkpointing": "torch_checkpointing is not installed: ITS SNIPPET IS NOT TESTED",
    "torchsnapshot": "torchsnapshot is not installed: pip install torchsnapshot-nightly==2024.7.26",
    "torchtitan": "torchtitan is not installed: ITS SNIPPET IS NOT TESTED",
    "transformers": "transformers is not installed: ITS SNIPPET IS NOT TESTED",
}


# What stands between a reader's interpreter and the process that is forked for a page.
AS_A_READER = """
import os, sys
pid_file, folder, here, root, page, *lines = sys.argv[1:]
os.setsid()  # so that all processes of the page can be ended
open(pid_file, "w").write(str(os.getpid()))
os.chdir(folder)
for name in [name for name in os.environ if name.startswith("BYTECHECKPOINT_")]:
    del os.environ[name]
os.environ["PYTHONPATH"] = root
sys.path[:0] = [here]
import run_page
run_page.run(page, lines, globals())
"""
Run = Callable[[Sequence[Snippet], Path], str]


@pytest.fixture
def run(ending_ranks: EndingRanks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that runs snippets of one page in a folder, and returns what they print."""

    def run(snippets: Sequence[Snippet], folder: Path) -> str:
        pid_file = tmp_path_factory.mktemp("page") / "pid"
        page, lines = snippets[0].page, [snippet.line for snippet in snippets]
        arguments = (pid_file, folder, Path(__file__).parent, ROOT, page, *lines)
        (ended,) = ending_ranks.run(1, run_script, AS_A_READER, *arguments, limit_s=LIMIT_S)
        if ended.code is None:
            with suppress(ProcessLookupError):
                os.killpg(int(pid_file.read_text()), signal.SIGKILL)
            raise AssertionError(f"not done after {LIMIT_S:g} s:\n{ended.said}")
        assert ended.code == 0, ended.said
        return ended.said

    return run


def with_snippets(needs: bool) -> list[object]:
    found = [(page, [s for s in snippets_of(page) if bool(s.needs) is needs]) for page in PAGES]
    return [pytest.param(snippets, id=page.name) for page, snippets in found if snippets]


@pytest.mark.parametrize("snippets", with_snippets(needs=False))
def test_snippets_run_in_their_order(snippets: list[Snippet], tmp_path: Path, run: Run) -> None:
    run(snippets, tmp_path)


@pytest.mark.parametrize("name", NOT_TESTED)
def test_snippets_that_need_a_package(name: str, tmp_path: Path, run: Run) -> None:
    if find_spec(name) is None:
        pytest.skip(NOT_TESTED[name])
    snippets = [snippet for page in PAGES for snippet in snippets_of(page) if snippet.needs == name]
    assert snippets
    run(snippets, tmp_path)


def test_the_quickstart_resumes(tmp_path: Path, run: Run) -> None:
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

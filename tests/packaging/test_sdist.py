# SPDX-License-Identifier: Apache-2.0
"""The sdist has all that the build needs, and says that its torch is chosen by the build. `make sdist` compiles it."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest
from make_sdist import check_files, make_sdist

ROOT = Path(__file__).parents[2]


def git(*arguments: str) -> str:
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="module")
def commit() -> str:
    """Returns a commit of the files as they lie here, which need not be committed."""
    if git("rev-parse", "--show-toplevel") != str(ROOT):
        pytest.skip("THE SDIST IS NOT TESTED: this is no checkout of git, but a copy of one")
    return git("stash", "create") or "HEAD"


@pytest.fixture(scope="module")
def sdist(commit: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sdist(ROOT, commit, tmp_path_factory.mktemp("sdist"))


def test_it_has_all_files_of_the_package_and_no_others(sdist: Path, commit: str) -> None:
    check_files(sdist, ROOT, commit)


def test_a_file_that_is_missing_is_noticed(sdist: Path, commit: str, tmp_path: Path) -> None:
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path / "all", filter="data")
    cut = tmp_path / sdist.name
    (tree,) = (tmp_path / "all").iterdir()
    (tree / "csrc/base/failpoint.h").unlink()
    with tarfile.open(cut, "w:gz") as opened:
        opened.add(tree, tree.name)
    with pytest.raises(AssertionError, match=r"failpoint\.h"):
        check_files(cut, ROOT, commit)


def test_what_it_requires_is_for_the_build_to_say(sdist: Path) -> None:
    with tarfile.open(sdist) as opened:
        (member,) = (member for member in opened if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO"))
        file = opened.extractfile(member)
        assert file is not None
        lines = file.read().decode().splitlines()
    assert "Dynamic: requires-dist" in lines

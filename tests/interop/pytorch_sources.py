# SPDX-License-Identifier: Apache-2.0
"""Fetches PyTorch's own tests of DCP for an installed release, and the packages that they need."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

FOLDER = "test/distributed/checkpoint"
REPOSITORY = "https://github.com/pytorch/pytorch"
_LIMIT_S = 600
_PACKAGES = ("expecttest", "zstandard")  # their modules have the same names


class SourcesError(Exception):
    """The tests, or packages that they import, are not available here."""


def fetch_tests(version: str, cache: Path, repository: str = REPOSITORY) -> Path:
    """Returns the folder of the tests of a release, and fetches it with git if it is not in ``cache`` yet.

    Args:
        version: Version of torch, such as ``2.15.0``; its tag is ``v2.15.0``.

    Raises:
        SourcesError: git is missing, or cannot fetch the tag.
    """
    place = cache / version
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            copy = Path(temporary) / "pytorch"
            _run("git", "init", "--quiet", str(copy))
            git = ("git", "-C", str(copy))
            _run(*git, "remote", "add", "origin", repository)
            _run(*git, "sparse-checkout", "set", FOLDER)
            _run(*git, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", f"refs/tags/v{version}")
            _run(*git, "checkout", "--quiet", "FETCH_HEAD")
            copy.rename(place)
    return tests_of(place)


def tests_of(source: Path) -> Path:
    """Returns the folder of the tests in a checkout of PyTorch.

    Raises:
        SourcesError: The checkout has no such folder.
    """
    tests = source / FOLDER
    if not tests.is_dir():
        raise SourcesError(f"{source} has no folder {FOLDER}")
    return tests


def fetch_packages(cache: Path) -> Path:
    """Returns a folder for ``PYTHONPATH`` with the packages that the tests need and that are not installed.

    Raises:
        SourcesError: pip cannot install them.
    """
    packages = cache / "packages"
    lacking = [name for name in _PACKAGES if find_spec(name) is None and not (packages / name).exists()]
    if lacking:
        cache.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *lacking)
    return packages


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourcesError(str(error)) from None
    if done.returncode:
        raise SourcesError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")

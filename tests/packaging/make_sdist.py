# SPDX-License-Identifier: Apache-2.0
"""Makes the sdist of a commit, and tries it: ``python tests/packaging/make_sdist.py CHECKOUT COMMIT TARGET``.

It is installed from source, without build isolation, into a new virtual environment, which takes torch and what builds
from the environment that runs this script. That compiles everything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from try_wheel import borrow, install, save_and_load

PACKED = ("bytecheckpoint", "csrc", "setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in")
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def git(checkout: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=checkout, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def make_sdist(checkout: Path, commit: str, target: Path) -> Path:
    """Packs the files of a commit, and nothing else that lies in the checkout."""
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "tree.tar"
        git(checkout, "archive", f"--output={archive}", commit)
        tree = Path(directory) / "tree"
        with tarfile.open(archive) as opened:
            opened.extractall(tree, filter="data")
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = target.glob("*.tar.gz")
    return sdist


def check_files(sdist: Path, checkout: Path, commit: str) -> None:
    """Checks that the sdist has every file of the package and of its build, and nothing that git does not know."""
    with tarfile.open(sdist) as opened:
        names = {member.name.partition("/")[2] for member in opened if member.isfile()}
    wanted = set(git(checkout, "ls-tree", "-r", "--name-only", commit, *PACKED))
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert len(wanted) > 400
    assert names - made == wanted, sorted((names - made) ^ wanted)


def main() -> None:
    checkout, commit, target = Path(sys.argv[1]).resolve(), sys.argv[2], Path(sys.argv[3]).resolve()
    shutil.rmtree(target, ignore_errors=True)
    sdist = make_sdist(checkout, commit, target)
    check_files(sdist, checkout, commit)
    with tempfile.TemporaryDirectory() as directory:
        python = borrow(Path(directory) / "venv")
        path = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])  # ninja
        install(python, sdist, {**os.environ, "PATH": path})
        save_and_load(python, Path(directory))
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB; built, installed, saved, loaded, verified")


if __name__ == "__main__":
    main()

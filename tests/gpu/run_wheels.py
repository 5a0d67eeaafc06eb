# SPDX-License-Identifier: Apache-2.0
"""What travels to a machine without network: wheels of packages that it may lack, and the order of the tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MOST_BYTES = 50 << 20
PYTHON = "3.12"
# Those of manylinux, the newest last, that a glibc of 2024 can load.
PLATFORMS = tuple(f"manylinux{name}_x86_64" for name in ("1", "2014", "_2_17", "_2_24", "_2_27", "_2_28"))
PREPARED = "prepared.json"


def git(root: Path, *arguments: str) -> str:
    """Returns what git says; nothing where there is no git, or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def prepared(folder: Path) -> dict[str, Any]:
    """Returns what ``prepare`` wrote: commit and order of the tests."""
    file = folder / PREPARED
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def group(root: Path) -> list[str]:
    packages: list[str] = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]["gpu"]
    return packages


def tests_newest_first(root: Path, folder: Path) -> list[str]:
    """Returns the files of tests/gpu, those that changed last first.

    What is not committed comes before all commits. Without a repository the order is that of ``prepare``, behind the
    files that it did not know.
    """
    names = sorted(str(path.relative_to(root)) for path in (root / "tests" / "gpu").glob("test_*.py"))
    dates = {name: git(root, "log", "-1", "--format=%ct", "--", name) for name in names}
    if any(dates.values()):
        changed = git(root, "status", "--porcelain", "--", "tests/gpu")

        def key(name: str) -> tuple[bool, float]:
            is_changed = not dates[name] or name in changed
            return is_changed, (root / name).stat().st_mtime if is_changed else int(dates[name])

        return sorted(names, key=key, reverse=True)
    known = prepared(folder).get("tests", [])
    return sorted(names, key=lambda name: known.index(name) if name in known else -1)


def prepare(root: Path, folder: Path) -> int:
    """Fetches the wheels, and writes the order of the tests. Returns 1 if too much would travel.

    Packages that come with torch, and torch itself, are expected there. The group `gpu` of pyproject.toml has two lists
    in one: what is pinned brings nothing along, what is not brings what it needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    packages = group(root)
    pinned = [package for package in packages if "==" in package]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    download += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    subprocess.run([*download, "--dest", str(folder), "--no-deps", *pinned], check=True)
    others = [package for package in packages if package not in pinned]
    subprocess.run([*download, "--dest", str(folder), *others], check=True)
    known = {"commit": git(root, "describe", "--always", "--dirty"), "tests": tests_newest_first(root, folder)}
    (folder / PREPARED).write_text(json.dumps(known, indent=1) + "\n")
    wheels = sum(file.stat().st_size for file in folder.iterdir())
    tracked = git(root, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    tree = sum((root / name).lstat().st_size for name in tracked if name and (root / name).exists())
    mib = (wheels + tree) / (1 << 20)
    print(f"{len(list(folder.glob('*.whl')))} wheels, {wheels / (1 << 20):.1f} MiB, in {folder.relative_to(root)}")
    print(f"with the tree {mib:.1f} MiB travel, {MOST_BYTES >> 20} MiB may")
    return 0 if wheels + tree <= MOST_BYTES else 1


def wheels_for_what_is_missing(root: Path, folder: Path) -> tuple[list[Path], list[str]]:
    """Returns the wheels to install here, and the packages that are missing and have none for this Python.

    A package that is older than what is wanted counts as missing.
    """
    oldest = {found[1]: found[2] for package in group(root) if (found := re.match(r"([\w-]+)>=([\d.]+)$", package))}
    fitting: list[Path] = []
    unfit: list[str] = []
    for wheel in sorted(folder.glob("*.whl")):
        name, *_, python, abi, _ = wheel.stem.split("-")
        if is_installed(name, oldest.get(name.replace("_", "-"), "0")):
            continue
        if python.startswith("py") or python == f"cp{sys.version_info[0]}{sys.version_info[1]}" or abi == "abi3":
            fitting.append(wheel)
        else:
            unfit.append(name)
    return fitting, unfit


def is_installed(package: str, oldest: str) -> bool:
    try:
        found = version(package)
    except PackageNotFoundError:
        return False
    return numbers_of(found) >= numbers_of(oldest)


def numbers_of(version_: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version_)[:3]]

# SPDX-License-Identifier: Apache-2.0
"""Makes the files of a release, the wheels and the sdist, of the commit that is checked out: ``make wheels``.

``python make_wheels.py 2.13.0-python3.11 2.13.0-python3.12 ...``, one wheel after the other, each by ``make wheel`` in
an environment of its own, which is removed before the next. What is done is not done again, unless the sources of the
package have changed; what was interrupted goes on in its environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "build" / "release"
DONE = RELEASE / "done.json"
WORK = ROOT / "build" / "release_work"  # holds one environment at a time
SOURCES = ("bytecheckpoint", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
# What one environment takes at most: torch with its CUDA libraries, the archives they come in, and a build.
MOST_BYTES = 12 * 10**9
SDIST = "sdist"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def check_clean() -> None:
    if changed := git("status", "--porcelain"):
        raise SystemExit(f"a release is made of a commit, and these files differ from it:\n{changed}")


def source(name: str, commit: str) -> str:
    """Returns what a file is made of, as one text: ids of git, and whether device code is wanted."""
    paths = (*SOURCES, "CHANGELOG.md") if name == SDIST else SOURCES
    ids = git("rev-parse", *(f"{commit}:{path}" for path in paths))
    return hashlib.sha256(f"{ids} {os.environ.get('BCP_BUILD_CUDA', '')}".encode()).hexdigest()


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


class Peak:
    """Measures what the environment takes of its disk at most: looks every second at what is used of all of it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._before = shutil.disk_usage(ROOT).used - size_of(WORK)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(1.0):
            self.num_bytes = max(self.num_bytes, shutil.disk_usage(ROOT).used - self._before)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def environment_of_build() -> dict[str, str]:
    """Returns the variables for what is built: all of it stays in the folder that is removed."""
    temporary = WORK / "tmp"
    remove(temporary)
    temporary.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    # Archives of torch that pip keeps would add up to more than the environment.
    return environment | {"TMPDIR": str(temporary), "PIP_NO_CACHE_DIR": "1"}


def export(commit: str, copy: Path) -> None:
    """Puts the files of a commit into ``copy``, with its time, so that what was made of them there is kept."""
    copy.mkdir(parents=True, exist_ok=True)
    archive = WORK / "tree.tar"
    git("archive", f"--output={archive}", commit)
    subprocess.run(["tar", "-x", "-f", archive, "-C", copy], check=True)
    archive.unlink()


def run_make(copy: Path, target: str, **variables: str) -> Path:
    """Runs a target of the Makefile in ``copy``, for the torch and Python that it is named after; returns the file."""
    torch, python = copy.name.split("-")[1:]
    chosen = {"IS_COPY": "yes", "TORCH": f"torch=={torch}", "PYTHON": python, **variables}
    command = ["make", target, *(f"{name}={value}" for name, value in chosen.items())]
    subprocess.run(command, cwd=copy, env=environment_of_build(), check=True)
    (file,) = (copy / "build" / ("wheels" if target == "wheel" else target)).iterdir()
    return file


def refuse_others(copy: Path, wheel: Path) -> list[str]:
    """Tries the wheels for other torches and this Python with the torch of the copy; each must say what is wrong."""
    python_tag, label = wheel.name.split("-")[2], wheel.name.split("-")[1]
    others = [other for other in sorted(RELEASE.glob(f"*-{python_tag}-*.whl")) if other.name.split("-")[1] != label]
    for other in others:
        command = [".venv/bin/python", "tests/packaging/try_wheel.py", "--refused", str(other)]
        subprocess.run(command, cwd=copy, check=True)
    return [other.name for other in others]


def make(name: str, environment: str, commit: str) -> dict[str, Any]:
    """Makes and tries one file of the release, in the environment for a torch and a Python; returns its entry."""
    copy = WORK / f"{source(environment, commit)[:12]}-{environment}"
    for other in WORK.iterdir() if WORK.exists() else ():
        if other != copy:
            remove(other)
    begin = time.monotonic()
    with Peak() as peak:
        export(commit, copy)
        if name == SDIST:
            file, refused = run_make(copy, "sdist", CHECKOUT=str(ROOT), COMMIT=commit), []
        else:
            file = run_make(copy, "wheel")
            refused = refuse_others(copy, file)
    kept = Path(shutil.copy(file, RELEASE))
    return {
        "file": kept.name,
        "sha256": sha256(kept),
        "source": source(name, commit),
        "seconds": round(time.monotonic() - begin),
        "peak_bytes": peak.num_bytes,
        "refused_with_this_torch": refused,
    }


def is_done(entry: dict[str, Any], made_of: str) -> bool:
    file = RELEASE / str(entry["file"])
    return entry["source"] == made_of and file.exists() and sha256(file) == entry["sha256"]


def main() -> None:
    names = sys.argv[1:]
    commit = git("rev-parse", "HEAD")
    check_clean()
    RELEASE.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        done = json.loads(DONE.read_text())
    done = {name: entry for name, entry in done.items() if is_done(entry, source(name, commit))}
    kept = {entry["file"] for entry in done.values()}
    for file in RELEASE.iterdir():
        if file.name not in kept and file != DONE:
            file.unlink()
    # The sdist is tried in the environment of the first wheel.
    for name in (names[0], SDIST, *names[1:]):
        if name in done:
            continue
        free = shutil.disk_usage(ROOT).free + size_of(WORK)
        if free < MOST_BYTES:
            raise SystemExit(f"{name}: {free / 1e9:.1f} GB are free, and {MOST_BYTES / 1e9:.0f} GB may be needed")
        done[name] = make(name, names[0] if name == SDIST else name, commit)
        written = DONE.with_suffix(".tmp")
        written.write_text(json.dumps(done, indent=2) + "\n")
        written.replace(DONE)
    remove(WORK)
    for _, entry in sorted(done.items()):
        size = (RELEASE / entry["file"]).stat().st_size
        print(
            f"{entry['file']}: {size / 1e6:.1f} MB, sha256 {entry['sha256']}; made and tried in {entry['seconds']} s, "
            f"with at most {entry['peak_bytes'] / 1e9:.1f} GB of disk"
        )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` says at its end how long each step took, also when one of them fails. Here its commands do nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = """#!/usr/bin/env bash
echo "make $1"
[ "$1" != "$FAILS" ]
"""


def run(folder: Path, fails: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the script with a `make` that does nothing, and fails where it is told to."""
    for name, text in (("tests/system_packages.sh", ""), ("bin/make", MAKE)):
        file = folder / name
        file.parent.mkdir()
        file.write_text(text)
        file.chmod(0o755)
    (folder / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAILS": fails}
    return subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_seconds_of_apt_get_and_pip_stand_apart(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert done.returncode == 0, done.stdout + done.stderr
    fetched, rest, beside = re.split(
        r" +\d+ s  the rest\n|beside these:\n", done.stdout.partition(" s  apt-get and")[2]
    )
    names = [re.findall(r"^ +\d+ s  (\S.*)$", part, re.MULTILINE) for part in (fetched, rest, beside)]
    assert [name.partition(":")[0] for name in names[0]] == ["apt-get", "pip", "pip"]
    assert [name for name in names[1] if name.startswith("make")] == [
        "make lint, and builds",
        "make test",
        "make docs",
        "make wheel",
    ]
    assert len(names[2]) == 2


@pytest.mark.parametrize(
    ("fails", "step"), [("docs", "make docs"), ("-j2", "wait for TSan"), ("environment", "pip: the newest torch")]
)
def test_a_step_that_fails_ends_the_run_and_is_named(fails: str, step: str, tmp_path: Path) -> None:
    done = run(tmp_path, fails)
    assert done.returncode == 1
    assert re.search(rf"^ +\d+ s  {step}.*: FAILED$", done.stdout, re.MULTILINE), done.stdout
    assert "make wheel" not in done.stdout

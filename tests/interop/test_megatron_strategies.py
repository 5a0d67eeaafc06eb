# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core saves and loads a small GPT through our strategies and through its own, in environments of its own.

They are made once, below ``build/megatron``: 6 GB, and on two cores 10 minutes, most of which builds the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.cli_runs import run

import bytecheckpoint

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "megatron"
TORCH = "torch==2.13.0"
# Versions of megatron-core, and the Python that each wants at least.
VERSIONS = {"0.16.1": (3, 11), "0.19.2": (3, 12)}
# Who saves and who loads, and how.
ROUNDS = [
    "ours:theirs",
    "theirs:ours",
    "ours.async:ours.registered",
    "theirs.parallel:ours.registered.parallel",
    "ours.registered.async.parallel:theirs.parallel",
]
WEIGHT = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("BCP_GROUND") != "1", reason="MEGATRON IS NOT TESTED: set BCP_GROUND=1, as `make ground` does"
    ),
    pytest.mark.timeout(3600),
]


def python_of(at_least: tuple[int, int]) -> str | None:
    """Returns a Python of at least this version that is here."""
    for name in (sys.executable, f"python{at_least[0]}.{at_least[1]}", "python3.13", "python3.12"):
        found = shutil.which(name)
        check = f"import sys; sys.exit(sys.version_info < {at_least})"
        if found and not subprocess.run([found, "-c", check], capture_output=True, check=False).returncode:
            return found
    return None


def checked(*command: str | Path, folder: Path = ROOT) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}{done.stderr[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module", params=VERSIONS)
def environment(request: pytest.FixtureRequest) -> Path:
    """Returns the Python of an environment that has a version of Megatron-Core, and the package as it is now."""
    version = request.param
    python = python_of(VERSIONS[version])
    if python is None:
        wanted = ".".join(map(str, VERSIONS[version]))
        pytest.skip(f"MEGATRON-CORE {version} IS NOT TESTED: install Python {wanted} or later, and put it in PATH")
    place, source = PLACE / version, PLACE / version / "source"
    bin_of = place / "bin"
    if not (place / "packages").exists():
        checked(python, "-m", "venv", place)
        pip = (bin_of / "python", "-m", "pip", "install", "-q", "--no-compile")
        checked(*pip, TORCH, f"megatron-core=={version}", "numpy", "psutil", "setuptools>=77", "wheel", "ninja")
        (place / "packages").touch()
    # What was built there is kept, so that only what has changed is built again.
    source.mkdir(exist_ok=True)
    archive = place / "source.tar"
    names = checked("git", "ls-files", "bytecheckpoint", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    with tarfile.open(archive, "w") as packed:
        for name in names.splitlines():
            packed.add(ROOT / name, name)
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    archive.unlink()
    install = (bin_of / "python", "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", ".")
    checked(*install, folder=source)
    return bin_of / "python"


@pytest.mark.parametrize("pair", ROUNDS)
def test_layouts(environment: Path, pair: str, tmp_path: Path) -> None:
    """What one saves, the other loads in other layouts, bit for bit."""
    said = checked(environment, "-m", "interop.megatron_strategies.ranks", tmp_path, pair, folder=ROOT / "tests")
    assert said.count("saves") == 8, said
    if pair.startswith("ours"):
        saved = [*tmp_path.iterdir()]
        assert not [path for path in saved if bytecheckpoint.verify(path).problems]
        assert [WEIGHT in run("ls", str(path)).stdout for path in saved if path.name.startswith("dense")] == [True]


def test_cases(environment: Path, tmp_path: Path) -> None:
    """Shapes, strictness, damage and failures."""
    said = checked(environment, "-m", "interop.megatron_strategies.cases", tmp_path, folder=ROOT / "tests")
    assert said.count("passed") >= 10, said


def test_distributed_optimizer(environment: Path, tmp_path: Path) -> None:
    """The sharded forms of Megatron's own optimizer, in other layouts."""
    said = checked(environment, "-m", "interop.megatron_strategies.optimizer", tmp_path, folder=ROOT / "tests")
    assert said.count("_reshardable") == 5, said

# SPDX-License-Identifier: Apache-2.0
"""Tries a wheel like a user who has torch and no compiler: ``python tests/packaging/try_wheel.py WHEEL``.

With ``--refused`` before WHEEL, it is one for another torch than there is, and its error must say so.

It installs the wheel into a new virtual environment, which takes torch and the other dependencies from the environment
that runs this script, but not the package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

SAVE_AND_LOAD = """
import pathlib, sys
import torch, torch.distributed.checkpoint as dcp
import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter

assert pathlib.Path(bytecheckpoint.__file__).is_relative_to(sys.prefix), bytecheckpoint.__file__
saved = {"weights": torch.arange(60000.0).reshape(300, 200), "step": 7}
dcp.save(saved, storage_writer=BcpWriter("checkpoint"))
got = {"weights": torch.zeros(300, 200), "step": 0}
dcp.load(got, storage_reader=BcpReader("checkpoint"))
assert torch.equal(got["weights"], saved["weights"]) and got["step"] == 7, got
"""
# In a process that cannot import the package.
READ_BY_STOCK_DCP = """
import sys
sys.modules["bytecheckpoint"] = None
import torch, torch.distributed.checkpoint as dcp

got = {"weights": torch.zeros(300, 200), "step": 0}
dcp.load(got, checkpoint_id="checkpoint")
assert torch.equal(got["weights"], torch.arange(60000.0).reshape(300, 200)) and got["step"] == 7, got
"""
REFUSED = """
import sys
import torch, bytecheckpoint

installed = torch.__version__.partition("+")[0]
try:
    bytecheckpoint.BcpWriter("checkpoint")
except ImportError as error:
    for said in (f"it was built for torch {sys.argv[1]}", f"and torch {installed}", "build it again"):
        assert said in str(error), error
else:
    raise SystemExit("a wheel for another torch was not refused")
"""


def check_names(wheel: Path) -> None:
    """Checks that the wheel contains what users need, and nothing that only tests call."""
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "bytecheckpoint/py.typed",
        "bytecheckpoint/_C.pyi",
        "observability/page/page.js",
        "licenses/LICENSE",
    ):
        assert any(name.endswith(wanted) for name in names), f"{wheel.name} lacks {wanted}"
    tops = {name.split("/")[0] for name in names} - {"bytecheckpoint", "bytecheckpoint.libs"}
    assert all(top.endswith(".dist-info") for top in tops), f"{wheel.name} has {tops}"
    unwanted = [name for name in names if "_testing" in name or name.endswith((".cpp", ".h", ".cu"))]
    assert not unwanted, f"{wheel.name} has {unwanted}"


def torch_of(wheel: Path) -> str:
    """Returns the minor version of torch that the label of a wheel names, after a look into what it requires."""
    built = wheel.name.split("-")[1].partition("+torch")[2]
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    assert f"Requires-Dist: torch=={built}.*" in lines, (wheel.name, lines)
    return built


def borrow(home: Path) -> Path:
    """Makes an environment that has the packages of this one, but not those that are editable; returns its Python."""
    venv.create(home, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    # Python does not follow the .pth files in that folder, so the editable package there stays out.
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


def install(python: Path, package: Path, environment: dict[str, str] | None = None) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    options = ["-q", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*pip, "install", *options, str(package)], check=True, env=environment)


def run(python: Path, directory: Path, *commands: list[str]) -> None:
    """Runs commands in ``directory``, where neither a compiler nor nvcc is."""
    without = ("PYTHONPATH", "CUDA_HOME", "CUDA_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"PATH": str(python.parent), "CC": "/bin/false", "CXX": "/bin/false"}
    for command in commands:
        subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)


def save_and_load(python: Path, directory: Path) -> None:
    scripts = [[str(python), "-c", script] for script in (SAVE_AND_LOAD, READ_BY_STOCK_DCP)]
    run(python, directory, *scripts, ["bcp", "verify", "checkpoint"], ["bcp", "doctor"])


def main() -> None:
    *options, name = sys.argv[1:]
    wheel = Path(name).resolve()
    check_names(wheel)
    built = torch_of(wheel)
    with tempfile.TemporaryDirectory() as directory:
        python = borrow(Path(directory) / "venv")
        install(python, wheel)
        if options == ["--refused"]:
            run(python, Path(directory), [str(python), "-c", REFUSED, built])
            print(f"{wheel.name}: refused with another torch, and says why")
        else:
            save_and_load(python, Path(directory))
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; installed, saved, loaded, verified")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Tries a wheel like a user who has torch and no compiler: ``python tests/packaging/try_wheel.py WHEEL``.

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

ROOT = Path(__file__).parents[2]

TRAIN_AND_RESUME = """
import pathlib, sys
import torch, torch.distributed.checkpoint as dcp
import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter

assert pathlib.Path(bytecheckpoint.__file__).is_relative_to(sys.prefix), bytecheckpoint.__file__
saved = {"weights": torch.randn(300, 200), "step": 7}
dcp.save(saved, storage_writer=BcpWriter("checkpoint"))
for reader in (BcpReader("checkpoint"), dcp.FileSystemReader("checkpoint")):
    got = {"weights": torch.zeros(300, 200), "step": 0}
    dcp.load(got, storage_reader=reader)
    assert torch.equal(got["weights"], saved["weights"]) and got["step"] == 7, (reader, got)
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


def try_wheel(wheel: Path, directory: Path) -> None:
    home = directory / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", str(wheel)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    # Python does not follow the .pth files in that folder, so the editable package there stays out.
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
    environment["PATH"] = str(home / "bin")  # neither a compiler nor nvcc
    for command in ([str(python), "-c", TRAIN_AND_RESUME], ["bcp", "verify", "checkpoint"], ["bcp", "doctor"]):
        subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    (wheel,) = (Path(name).resolve() for name in sys.argv[1:])
    check_names(wheel)
    with tempfile.TemporaryDirectory() as directory:
        try_wheel(wheel, Path(directory))
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB; installed, saved, loaded, verified")


if __name__ == "__main__":
    main()

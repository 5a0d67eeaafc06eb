# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp doctor``: it says what works on this machine, and what to do about what does not."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import as_json, run

import bytecheckpoint
from bytecheckpoint import native
from bytecheckpoint.cli import machine
from bytecheckpoint.probes import of_torch, probe
from bytecheckpoint.probes.probe import Probe


def finding(said: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [item for item in said["machine"] if item["name"] == name]
    return dict(found)


def test_here_nothing_is_broken(tmp_path: Path) -> None:
    said = as_json("doctor", str(tmp_path))
    assert said["broken"] == 0
    versions = {item["name"]: item["version"] for item in said["versions"]}
    assert versions["bytecheckpoint"] == bytecheckpoint.__version__
    assert versions["torch"]
    features = {item["name"]: item for item in said["features"]}
    assert all(probe["holds"] for probe in features["register()"]["probes"])
    assert finding(said, "checksum")["text"] == f"kernel: {bytecheckpoint.build_info()['core']['crc32']}"
    assert finding(said, "path")["text"].startswith(f"{tmp_path}: ")
    assert finding(said, "flock")["state"] == "ok"
    assert list(tmp_path.iterdir()) == []
    text = run("doctor", str(tmp_path))
    assert text.exit_code == 0
    assert text.output.splitlines()[-1].endswith("private names of torch in use; nothing is broken")


def test_without_a_path_nothing_is_said_of_one() -> None:
    assert {"path", "flock", "O_DIRECT"}.isdisjoint(item["name"] for item in as_json("doctor")["machine"])


def test_a_refused_feature_is_broken_and_a_fallback_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ""
    fault = Probe.fault
    monkeypatch.setattr(Probe, "fault", lambda self: "it is gone" if self.path == lost else fault(self))
    lost = of_torch.NAMES_OF_2_3.probes[0].path
    result = run("doctor")
    assert result.exit_code == 0
    (line,) = [line.strip() for line in result.output.splitlines() if lost in line]
    assert line.startswith(f"{lost}: it is gone (It can flatten as torch 2.3 did")
    assert line.endswith(of_torch.NAMES_OF_2_3.probes[0].fallback)
    lost = "torch.distributed.checkpoint.state_dict_saver:_storage_setup"
    said = as_json("doctor", code=1)
    (broken,) = [item for item in said["features"] if item["state"] == "broken"]
    assert broken["name"] == of_torch.REGISTER.name
    assert broken["advice"] == of_torch.REGISTER.advice


def test_a_newer_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = probe.version
    monkeypatch.setattr(probe, "version", lambda name: "2.99.0" if name == "torch" else theirs(name))
    monkeypatch.setattr("bytecheckpoint.cli.doctor.torch_mismatch", lambda: "")  # as if it was built for it
    torch = torch_in(as_json("doctor"))
    assert (torch["version"], torch["state"]) == ("2.99.0", "note")


def torch_in(said: dict[str, Any]) -> dict[str, str]:
    (found,) = [item for item in said["versions"] if item["name"] == "torch"]
    return dict(found)


@pytest.mark.parametrize(
    ("version", "state", "advice"),
    [
        ("2.3.0", "broken", "it is too old: install torch 2.10 or newer, and build it again"),
        ("2.99.0", "broken", "and torch 2.99.0 is installed; build it again"),
        ("git-1234", "note", "'git-1234' is no version that is known"),
    ],
)
def test_a_torch_that_does_not_fit_is_told_first(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str, advice: str
) -> None:
    theirs = probe.version
    for module in (probe, native):
        monkeypatch.setattr(module, "version", lambda name: version if name == "torch" else theirs(name))
    torch = torch_in(as_json("doctor", code=1))
    assert (torch["version"], torch["state"]) == (version, state)
    assert advice in torch["advice"]
    lines = run("doctor").output.splitlines()
    assert re.match(rf"{state} +torch +{version}", lines[2])
    assert any(advice in line for line in lines[:12])


def test_a_torch_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = probe.version

    def version(name: str) -> str:
        if name == "torch":
            raise PackageNotFoundError(name)
        return theirs(name)

    monkeypatch.setattr(probe, "version", version)
    torch = torch_in(as_json("doctor"))
    assert (torch["version"], torch["state"]) == ("(unknown version)", "note")


def test_settings_that_cannot_work_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTECHECKPOINT_STAGING_BYTES", str(1 << 60))
    assert "staging_bytes asks for" in finding(as_json("doctor", code=1), "memory")["text"]
    monkeypatch.setenv("BYTECHECKPOINT_STAGING_BYTES", "many")
    assert "STAGING_BYTES" in finding(as_json("doctor", code=1), "settings")["text"]


def test_a_path_that_is_not_there_yet_is_looked_at_above(tmp_path: Path) -> None:
    said = as_json("doctor", str(tmp_path / "run" / "step-1"))
    assert finding(said, "path")["text"].startswith(f"{tmp_path}: ")
    assert "is not there yet" in finding(said, "path")["text"]


def test_a_file_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert finding(as_json("doctor", str(tmp_path / "file"), code=1), "path")["state"] == "broken"


def test_memory_is_no_place_for_checkpoints_either() -> None:
    if machine._file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm IS NO TMPFS HERE")
    assert finding(as_json("doctor", "/dev/shm"), "path")["state"] == "note"


def test_where_nothing_can_be_written_is_broken() -> None:
    assert "no file can be made in /proc" in finding(as_json("doctor", "/proc", code=1), "writing")["text"]


def test_what_a_file_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    said = as_json("doctor", str(tmp_path))
    assert (finding(said, "O_DIRECT")["state"], finding(said, "flock")["state"]) == ("slow", "note")
    assert finding(said, "O_DIRECT")["advice"]


@pytest.mark.parametrize(
    ("device", "of_torch", "driver", "architectures", "state"),
    [
        (False, "13.2", None, ["sm_90"], "ok"),
        (True, None, (13, 0), ["sm_90"], "note"),
        (True, "13.2", None, ["sm_90"], "broken"),
        (True, "13.2", (12, 4), ["sm_90"], "broken"),
        (True, "12.8", (13, 0), [], "slow"),
    ],
)
def test_gpu_driver_and_builds(
    device: bool, of_torch: str | None, driver: Any, architectures: list[str], state: str
) -> None:
    assert machine.gpu_finding(device, of_torch, driver, architectures, None).state == state


@pytest.mark.parametrize(
    ("capability", "state", "text"),
    [((9, 0), "ok", "compiled for it"), ((8, 6), "ok", "runs"), ((7, 5), "slow", ""), ((12, 0), "ok", "by PTX")],
)
def test_device_and_device_code(capability: tuple[int, int], state: str, text: str) -> None:
    architectures = ["sm_80", "sm_90", "sm_100", "compute_100"]
    found = machine.gpu_finding(True, "13.0", (13, 0), architectures, capability)
    assert found.state == state
    assert text in found.text


@pytest.mark.parametrize(("architectures", "state"), [(["sm_80"], "slow"), (["compute_80"], "ok")])
def test_a_newer_device_needs_ptx(architectures: list[str], state: str) -> None:
    assert machine.gpu_finding(True, "13.0", (13, 0), architectures, (9, 0)).state == state


def test_the_other_package_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ByteDance's installs into the same folder, so each replaces files of the other."""
    metadata = tmp_path / "bytecheckpoint-0.0.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: bytecheckpoint\nVersion: 0.0.3\n")
    assert run("doctor").exit_code == 0
    monkeypatch.syspath_prepend(tmp_path)
    said = run("doctor")
    assert said.exit_code == 1
    assert "the package bytecheckpoint 0.0.3 is installed beside bytecheckpoint-dcp" in said.output
    assert "pip uninstall both" in said.output

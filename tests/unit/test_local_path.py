# SPDX-License-Identifier: Apache-2.0
"""What is taken for a path, by all that take one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from unit.cli_runs import run
from unit.run_folder import save_at, small_state

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, Retention, latest, load_state_dict, prune, save_state_dict, scan_steps
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.local_path import local_path


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = os.path.expanduser("~root")  # noqa: PTH111
    for given, wanted in {
        "run/step-1": "run/step-1",
        ".": ".",
        "~": str(tmp_path),
        "~/run": f"{tmp_path}/run",
        "~root/run": f"{home}/run",
        "run/~": "run/~",
        "./~": "~",
        "file:///run/step-1": "/run/step-1",
        "FILE://localhost/run": "/run",
        "file:///a%20b/%7E%25/%C3%A4": "/a b/~%/ä",
        "file:///~/run": "/~/run",
    }.items():
        assert local_path(given) == Path(wanted), given
    assert local_path(Path("~/run")) == tmp_path / "run"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "s3://bucket/secret",
        "gs://secret",
        "file://host/secret",
        "file://",
        "file://localhost",
        "file:///a?secret",
        "file:///a#secret",
        "file:///%FF",
        "file:///a%00secret",
        "a\0b",
        "\udcff",
        "~nosuchuser7/run",
        None,
        7,
        b"run",
    ],
)
def test_what_names_no_directory(given: Any) -> None:
    with pytest.raises(ConfigError) as told:
        local_path(given)
    assert "secret" not in str(told.value) or given == "file:///a%00secret"


ENTRY_POINTS: dict[str, Callable[[str], object]] = {
    "BcpWriter": BcpWriter,
    "BcpReader": BcpReader,
    "reset": lambda path: BcpReader(".").reset(path or "s3://"),
    "save_state_dict": lambda path: save_state_dict(path, {}, no_dist=True),
    "load_state_dict": lambda path: load_state_dict(path, {}, no_dist=True),
    "save": lambda path: bytecheckpoint.save(path, {"model": nn.Linear(1, 1)}, "ddp", global_steps=1),
    "load": lambda path: bytecheckpoint.load(path, {"model": nn.Linear(1, 1)}, "ddp"),
    "latest": latest,
    "find_latest_ckpt_path": bytecheckpoint.find_latest_ckpt_path,
    "scan_steps": scan_steps,
    "prune": lambda path: prune(path, keep_latest=1),
    "Retention": lambda path: Retention(path, keep_latest=1),
    "verify": bytecheckpoint.verify,
    "merge": lambda path: bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(path, "out"),
    "merge to": lambda path: bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(".", path),
}


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_no_entry_point_makes_a_folder_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("s3://bucket/run", ""):
        with pytest.raises(ConfigError, match="a directory"):
            ENTRY_POINTS[entry](path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "verify", "steps", "show", "diff"])
def test_no_command_looks_for_a_url(command: str) -> None:
    more = {"show": ["name"], "diff": ["gs://bucket/other"]}.get(command, [])
    for path in ("gs://bucket/run", ""):
        said = run(command, path, *more)
        assert said.exit_code == 2
        assert "a directory" in said.stderr
        assert len(said.stderr.splitlines()) == 1


def test_home_and_file_urls_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    save_state_dict("~/run/step-1", small_state(3), no_dist=True)
    save_at(local_path(f"file://{home}/run/step-%32"), 4)
    bytecheckpoint.save("~/parts", {"model": nn.Linear(2, 2)}, "ddp", global_steps=1)
    assert list(elsewhere.iterdir()) == []
    assert latest("~/run") == latest(f"file://{home}/run") == str(home / "run" / "step-2")
    assert latest("~/parts") == bytecheckpoint.find_latest_ckpt_path("~/parts") == str(home / "parts/global_step_1")
    state = small_state()
    load_state_dict(f"file://localhost{home}/run/step-1", state, no_dist=True)
    assert torch.equal(state["weight"], small_state(3)["weight"])
    assert run("ls", "~/run/step-1").exit_code == 0
    assert [folder.step for folder in scan_steps("~/run")] == [1, 2]
    assert prune("~/run", keep_latest=1).removed == [str(home / "run" / "step-1")]

# SPDX-License-Identifier: Apache-2.0
"""Tests what counts as a path, in everything that takes a path."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.cli_runs import run
from torch import nn
from unit.run_folder import save_at, small_state

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, Retention, latest, load_state_dict, save_state_dict, scan_steps
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.storage.paths import local_path

LIMIT_S = 60.0


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    home = os.path.expanduser("~root")  # noqa: PTH111
    for given, wanted in {
        "run/step-1": f"{tmp_path}/run/step-1",
        ".": str(tmp_path),
        "~": str(tmp_path),
        "~/run": f"{tmp_path}/run",
        "~root/run": f"{home}/run",
        "run/~": f"{tmp_path}/run/~",
        "./~": f"{tmp_path}/~",
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
    "reset": lambda path: BcpReader(".").reset(path or "hdfs://"),
    "save_state_dict": lambda path: save_state_dict(path, {}, no_dist=True),
    "load_state_dict": lambda path: load_state_dict(path, {}, no_dist=True),
    "save": lambda path: bytecheckpoint.save(path, {"model": nn.Linear(1, 1)}, "ddp", global_steps=1),
    "load": lambda path: bytecheckpoint.load(path, {"model": nn.Linear(1, 1)}, "ddp"),
    "latest": latest,
    "find_latest_ckpt_path": bytecheckpoint.find_latest_ckpt_path,
    "scan_steps": scan_steps,
    "prune": lambda path: Retention(path, keep_latest=1).prune(),
    "Retention": lambda path: Retention(path, keep_latest=1),
    "verify": bytecheckpoint.verify,
    "merge": lambda path: bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(path, "out"),
    "merge to": lambda path: bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(".", path),
}


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_no_entry_point_makes_a_folder_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("hdfs://bucket/run", ""):
        with pytest.raises(ConfigError, match=r"a directory|unknown kind of store"):
            ENTRY_POINTS[entry](path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "verify", "steps", "show", "diff"])
def test_no_command_looks_for_a_url(command: str) -> None:
    more = {"show": ["name"], "diff": ["hdfs://bucket/other"]}.get(command, [])
    for path in ("hdfs://bucket/run", ""):
        said = run(command, path, *more)
        assert said.exit_code == 2
        assert "a directory" in said.stderr or "unknown kind of store" in said.stderr
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
    assert Retention("~/run", keep_latest=1).prune().protected == {
        str(home / "run" / "step-1"): ANY
    }  # it was loaded last
    load_state_dict("~/run/step-2", state, no_dist=True)
    assert Retention("~/run", keep_latest=1).prune().removed == [str(home / "run" / "step-1")]


# A relative path belongs to the working directory of the call, even if the process changes directory before it uses it.


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Returns the working directory, and another directory that a test may change to."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield here, elsewhere
    dist.destroy_process_group()
    bytecheckpoint.shutdown(LIMIT_S)


class Later:
    """A stager of ``dcp.async_save`` that has staged when a test calls ``go_on``."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self.staged: Future[dict[str, Any]] = Future()

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        self._state = state_dict
        return self.staged

    def go_on(self) -> None:
        self.staged.set_result(self._state)

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


BY_DCP: dict[str, Callable[[], dict[str, Any]]] = {
    "register": lambda: {"checkpoint_id": "run/a"},
    "a writer": lambda: {"storage_writer": BcpWriter("run/a"), "planner": BcpSavePlanner()},
    "a writer and a path": lambda: {"storage_writer": BcpWriter("b"), "checkpoint_id": "run/a"},
}


@pytest.mark.parametrize("name", BY_DCP)
def test_saves_of_dcp_go_to_the_directory_of_the_call(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here, elsewhere = places
    stager = Later()
    with bytecheckpoint.registered() if name == "register" else contextlib.nullcontext():
        future: Any = dcp.async_save(small_state(), async_stager=stager, **BY_DCP[name]())  # type: ignore[arg-type]
    monkeypatch.chdir(elsewhere)
    stager.go_on()
    getattr(future, "upload_completion", future).result(LIMIT_S)
    assert list(elsewhere.iterdir()) == []
    assert (here / "run" / "a" / ".metadata").is_file()


def test_a_writer_that_is_directed_to_a_path_takes_that_of_the_call(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = places
    writer, reader = BcpWriter("run/a"), BcpReader("run/a")
    assert writer.path == reader.path == here / "run" / "a"
    monkeypatch.chdir(elsewhere)
    writer.reset()
    reader.reset()
    assert writer.path == reader.path == here / "run" / "a"
    dcp.save(small_state(), checkpoint_id="run/a", storage_writer=writer, no_dist=True)
    reader.reset("run/a")
    assert writer.path == reader.path == elsewhere / "run" / "a"
    assert list(here.iterdir()) == []


class Waiting(BcpSavePlanner):
    """Plans once a test has set ``go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def create_local_plan(self) -> Any:
        assert self.go_on.wait(LIMIT_S)
        return super().create_local_plan()


def test_our_own_saves_go_to_the_directory_of_the_call(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = places
    planner = Waiting()
    first = bytecheckpoint.async_save_state_dict("run/a", small_state(), planner=planner)
    model = {"model": nn.Linear(1, 1)}
    config = bytecheckpoint.Config(on_staging_busy="double_buffer")
    second = bytecheckpoint.save("parts", model, "ddp", True, 1, config=config)  # after the first, in its thread
    monkeypatch.chdir(elsewhere)
    planner.go_on.set()
    assert first.committed.result(LIMIT_S).path == first.path == str(here / "run" / "a")
    assert second.committed.result(LIMIT_S).path == second.path == str(here / "parts" / "global_step_1")
    assert list(elsewhere.iterdir()) == []
    assert sorted(path.name for path in here.iterdir()) == ["parts", "run"]
    assert latest(here / "parts") == second.path


def test_what_is_made_of_a_path_keeps_it(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = places
    for step in (1, 2):
        save_at(Path(f"run/step-{step}"), step)
    retention, reader = Retention("run", keep_latest=1), BcpReader(Path("run/step-2"))
    (found, _), newest = scan_steps("run"), latest("run")
    monkeypatch.chdir(elsewhere)
    assert newest == str(here / "run" / "step-2")
    assert found.path == str(here / "run" / "step-1")
    state = small_state()
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["weight"], small_state(2)["weight"])
    assert retention.prune().removed == [str(here / "run" / "step-1")]


def test_links_in_a_path_are_not_resolved(places: tuple[Path, Path]) -> None:
    here, elsewhere = places
    (here / "link").symlink_to(elsewhere)
    assert local_path("link/run") == here / "link" / "run"
    assert str(local_path("link/../run")) == f"{here}/link/../run"
    assert BcpWriter("link/run").checkpoint_id == here / "link" / "run"


def test_a_working_directory_that_is_gone(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = places
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    with pytest.raises(StorageError, match=r"'run': .*working directory"):
        BcpWriter("run")
    save_state_dict(elsewhere / "run", small_state(), no_dist=True)


def test_a_state_in_the_place_of_the_path_is_told_in_one_line(places: tuple[Path, Path]) -> None:
    state: Any = {f"layer.{number}": torch.ones(1000) for number in range(1000)}
    with pytest.raises(ConfigError, match="got a dict: our calls take the path first, then the state") as caught:
        save_state_dict(state, "run", no_dist=True)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)

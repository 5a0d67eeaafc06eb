# SPDX-License-Identifier: Apache-2.0
"""``drain`` and ``bcp drain``: steps go from a near run to a durable one, whole, in the order of their commits."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import as_json, run

import bytecheckpoint
from bytecheckpoint import Retention, drain, latest, pin, read, save_state_dict, scan_steps, verify
from bytecheckpoint.checkpoint.keeping import note_drain, pins_of
from bytecheckpoint.errors import ConfigError

LIMIT_S = 60.0


def save(near: Path, step: int, value: float | None = None, numel: int = 1000) -> None:
    value = float(step) if value is None else value
    save_state_dict(near / f"step-{step}", {"w": torch.full((numel,), value), "step": step}, no_dist=True)


def value_of(durable: Path, step: int) -> float:
    verify(durable / f"step-{step}").raise_if_damaged()
    (value,) = set(read(durable / f"step-{step}")["w"].tolist())
    return float(value)


def names(paths: list[str]) -> list[str]:
    return [path.rpartition("/")[2] for path in paths]


@pytest.fixture
def near(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path / "near", step)
    return tmp_path / "near"


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    return tmp_path / "durable"


def test_in_the_order_of_their_commits(near: Path, durable: Path) -> None:
    report = drain(near, durable)
    assert names(report.drained) == ["step-10", "step-20", "step-30"]
    assert (report.dropped, report.failed) == ([], {})
    assert [value_of(durable, step) for step in (10, 20, 30)] == [10, 20, 30]
    assert latest(durable) == str(durable / "step-30")
    again = drain(near, durable)
    assert (again.drained, again.num_bytes) == ([], 0)
    save(near, 40)
    assert names(drain(near, durable).drained) == ["step-40"]
    assert pins_of([str(near / f"step-{step}") for step in (10, 20, 30, 40)]) == {}


def test_newer_is_what_was_committed_later(near: Path, durable: Path) -> None:
    """A run that went back saves lower steps, and some anew: the durable ones are replaced."""
    drain(near, durable)
    save(near, 15)
    save(near, 20, 21.0)
    assert names(drain(near, durable).drained) == ["step-15", "step-20"]
    assert (value_of(durable, 15), value_of(durable, 20), value_of(durable, 30)) == (15, 21, 30)
    assert latest(durable) == str(durable / "step-20")


def test_the_oldest_are_dropped(near: Path, durable: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (40, 50):
        save(near, step)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        report = drain(near, durable, most_waiting=1)
    assert (names(report.drained), names(report.dropped)) == (["step-40", "step-50"], ["step-10", "step-20", "step-30"])
    assert "step-10 is dropped: 2 newer steps wait" in caplog.text
    assert names(drain(near, durable, most_waiting=9).drained) == []  # older than what is there: dropped for good


def test_only_some_steps(near: Path, durable: Path) -> None:
    assert names(drain(near, durable, every=20).drained) == ["step-20"]
    assert not (durable / "step-30").exists()


def test_a_durable_place_that_refuses(near: Path, durable: Path) -> None:
    """Nothing is raised: training need not care. What waits goes when the place is there again."""
    durable.write_text("no folder")
    report = drain(near, durable)
    assert len(report.failed) == 3
    assert report.drained == []
    durable.unlink()
    assert len(drain(near, durable).drained) == 3


def test_damage_near_by_stops_that_step_alone(near: Path, durable: Path) -> None:
    (file,) = (near / "step-20").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:2000] + b"x" + file.read_bytes()[2001:])
    (near / "step-25").mkdir()
    (near / "step-25" / "__0_0.distcp").write_bytes(b"half")
    report = drain(near, durable)
    assert names(report.drained) == ["step-10", "step-30"]
    assert file.name in report.failed[str(near / "step-20")]
    assert sorted(path.name for path in durable.iterdir()) == ["step-10", "step-30"]


PRUNE = "import sys; from bytecheckpoint import Retention; print(Retention(sys.argv[1], keep_latest=1).prune().kept)"


def test_the_step_under_way_is_not_pruned(near: Path, durable: Path) -> None:
    kept: list[str] = []

    def prune(done: int, total: int) -> None:
        if not kept:
            command = [sys.executable, "-c", PRUNE, str(near)]
            kept.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())

    report = drain(near, durable, progress=prune)
    assert kept == ["[10, 30]"]
    assert names(report.drained) == ["step-10", "step-30"]
    assert names(report.dropped) == ["step-20"]  # it went while it waited
    assert report.failed == {}
    assert Retention(near, keep_latest=1).prune().kept == [30]


def test_pins_of_others_stay_and_those_of_a_dead_drain_go(near: Path, durable: Path) -> None:
    pin(near / "step-10", "released")
    note_drain(str(near / "step-20"), "is being drained")
    drain(near, durable, every=30)
    assert pins_of([str(near / f"step-{step}") for step in (10, 20, 30)]) == {str(near / "step-10"): "pinned: released"}


def test_two_at_once(near: Path, durable: Path) -> None:
    reports = []

    def second(done: int, total: int) -> None:
        if not reports:
            reports.append(None)
            reports[0] = drain(near, durable)

    first = drain(near, durable, progress=second)
    assert names(first.drained) == ["step-10"]
    assert any("step-10" in path for path in reports[0].failed)
    assert names(reports[0].drained) == ["step-20", "step-30"]
    assert [value_of(durable, step) for step in (10, 20, 30)] == [10, 20, 30]


def test_a_mark_without_its_files_is_no_copy(near: Path, durable: Path) -> None:
    """As cp and upload tools leave it: the step is copied, and not taken for drained."""
    (durable / "step-30").mkdir(parents=True)
    (durable / "step-30/.metadata").write_bytes((near / "step-30/.metadata").read_bytes())
    assert names(drain(near, durable).drained) == ["step-10", "step-20", "step-30"]
    assert value_of(durable, 30) == 30
    (file,) = (durable / "step-30").glob("*.distcp")
    os.truncate(file, 100)
    assert names(drain(near, durable).drained) == ["step-30"]
    assert value_of(durable, 30) == 30


def save_live(near: Path, step: int, value: float) -> None:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    state = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9),
        "extra_state": {"v": value},
    }
    bytecheckpoint.save(near, state, "ddp", global_steps=step)


def test_steps_in_parts_and_their_tracker(tmp_path: Path, durable: Path) -> None:
    near = tmp_path / "live"
    save_live(near, 1, 1.0)
    assert names(drain(near, durable).drained) == ["global_step_1"]
    assert (durable / "latest_checkpointed_iteration.txt").read_text() == "1"
    save_live(near, 1, 2.0)  # anew, and its model is damaged: the durable one stays as it was, all of it
    (file,) = (near / "global_step_1/model").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-600] + bytes(600))
    assert len(drain(near, durable).failed) == 1
    assert latest(durable) == str(durable / "global_step_1")
    assert read(durable / "global_step_1/model")["weight"].eq(1).all()
    assert [folder.state for folder in scan_steps(durable, deep=True)] == ["complete"]


def test_what_is_no_run(near: Path, durable: Path) -> None:
    with pytest.raises(ConfigError, match="this folder is a checkpoint itself"):
        drain(near / "step-10", durable)
    with pytest.raises(ConfigError, match="near and durable are one folder"):
        drain(near, near)


def test_a_run_that_has_not_begun(tmp_path: Path, durable: Path) -> None:
    assert drain(tmp_path / "none", durable).drained == []
    assert not durable.exists()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"most_waiting": 0}, {"every": True}, {"watch_s": 0}])
def test_arguments_out_of_range(near: Path, durable: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        drain(near, durable, **wrong)


def test_it_goes_on_looking(near: Path, durable: Path) -> None:
    stop = threading.Event()
    reports = []
    thread = threading.Thread(target=lambda: reports.append(drain(near, durable, watch_s=0.05, stop=stop)), daemon=True)
    thread.start()
    wait_for(durable / "step-30/.metadata")
    save(near, 40)
    wait_for(durable / "step-40/.metadata")
    stop.set()
    thread.join(LIMIT_S)
    assert names(reports[0].drained) == ["step-10", "step-20", "step-30", "step-40"]


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_command(near: Path, durable: Path) -> None:
    told = as_json("drain", str(near), str(durable), "--every", "10", "--rate", "100")
    assert names(told["drained"]) == ["step-10", "step-20", "step-30"]
    save(near, 40)
    lines = run("drain", str(near), str(durable)).output.splitlines()
    assert "step-40" in lines[-2]
    assert lines[-1].startswith(f"{durable}: drained 1; ")
    save(near, 50)
    (file,) = (near / "step-50").glob("*.distcp")
    file.write_bytes(b"")
    failed = run("drain", str(near), str(durable))
    assert (failed.exit_code, "1 failed" in failed.output) == (1, True)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "bytecheckpoint", "drain", str(tmp_path / "near"), str(tmp_path / "durable")]
    process = subprocess.Popen([*command, "--watch", "0.05", "--rate", "8", "--no-progress"], stdout=subprocess.PIPE)
    with process:
        yield process
        process.kill()


def test_killed_in_a_step_it_goes_on_there(tmp_path: Path, watching: subprocess.Popen[bytes]) -> None:
    near, durable = tmp_path / "near", tmp_path / "durable"
    save(near, 10, numel=5 << 20)
    wait_for(durable / "step-10")
    watching.kill()
    watching.wait()
    assert not (durable / "step-10/.metadata").exists()
    assert [folder.is_complete for folder in scan_steps(durable)] in ([], [False])
    save(near, 20)
    assert names(drain(near, durable).drained) == ["step-10", "step-20"]
    assert (value_of(durable, 10), value_of(durable, 20)) == (10, 20)
    assert pins_of([str(near / "step-10")]) == {}


def test_sigterm_ends_it_behind_the_step(tmp_path: Path, watching: subprocess.Popen[bytes]) -> None:
    near, durable = tmp_path / "near", tmp_path / "durable"
    save(near, 10, numel=5 << 20)
    wait_for(durable / "step-10")
    os.kill(watching.pid, signal.SIGTERM)
    out, _ = watching.communicate(timeout=LIMIT_S)
    assert watching.returncode == 0
    assert b"drained 1" in out
    assert value_of(durable, 10) == 10

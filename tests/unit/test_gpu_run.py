# SPDX-License-Identifier: Apache-2.0
"""Tests of ``tests/gpu/run.py`` itself: limits of steps, their order, and what a run that is cut off leaves.

The script runs in a tree of its own, in which building, looking at the device and measuring are small scripts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.timed_steps import Run, Step

ROOT = Path(__file__).parents[2]
OF_RUN = ("run.py", "run_plan.py", "run_table.py", "run_wheels.py")
MACHINE = {"device": "A device", "torch": "2.11.0", "cuda": "13.0", "build": {"cuda": ["sm_90"]}}
WRITES_JSON = """
import sys
from pathlib import Path

CONTENT = '''{content}'''
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(CONTENT)
"""
PASSES = "def test_passes():\n    pass\n"
HANGS = "import time\n\n\ndef test_passes():\n    pass\n\n\ndef test_hangs():\n    time.sleep(600)\n"


# --- steps


def made_run(folder: Path, limit_s: float = 60.0, **group_limits_s: float) -> Run:
    return Run(folder, limit_s, group_limits_s, {"mode": "test"}, {}, {sys.executable: "python3"}, lambda text: None)


def shell(name: str, script: str, limit_s: float = 30.0, **more: Any) -> Step:
    return Step(name, ("sh", "-c", script), limit_s, **more)


def statuses(run: Run) -> dict[str, str]:
    kept = json.loads(run.file.read_text())
    return {entry["name"]: entry["status"] for entry in kept["steps"]}


def is_running(process: int) -> bool:
    """Whether it exists and has not ended. What nobody has waited for yet has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_step_over_its_limit_is_stopped_with_its_children_and_what_was_done_is_kept(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    figures, child = tmp_path / "figures.json", tmp_path / "child"
    run.run(shell("before", "echo done"))
    # Neither the shell nor its child ends at Ctrl-C.
    script = f"trap '' INT; echo '[7]' > {figures}; sleep 600 & echo $! > {child}; echo at work; wait; sleep 600"
    run.run(shell("too long", script, limit_s=0.5, json_file=figures))
    run.run(shell("behind", "echo done"))
    assert statuses(run) == {"before": "ok", "too long": "stopped", "behind": "ok"}
    assert not is_running(int(child.read_text()))
    stopped = run.report["steps"][1]
    assert (stopped["figures"], stopped["exit_status"], stopped["tail"]) == ([7], None, "at work\n")
    assert run.finish() == []  # it has figures


def test_a_stopped_step_without_figures_is_missing(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    run.run(shell("too long", "sleep 600", limit_s=0.2, json_file=tmp_path / "never"))
    assert run.finish() == ["too long: stopped, it was stopped at its limit"]


def test_children_that_a_step_leaves_behind_are_ended(tmp_path: Path) -> None:
    child = tmp_path / "child"
    made_run(tmp_path).run(shell("leaves one", f"sleep 600 & echo $! > {child}"))
    assert not is_running(int(child.read_text()))


def test_the_report_is_on_disk_before_each_step(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    run.run(shell("first", "exit 3"))
    run.run(shell("second", f"cp {run.file} {tmp_path}/seen"))
    seen = json.loads((tmp_path / "seen").read_text())["steps"]
    assert [(entry["name"], entry["status"]) for entry in seen] == [("first", "failed"), ("second", "running")]
    assert seen[0]["exit_status"] == 3


def test_what_cannot_be_done_is_not_started(tmp_path: Path) -> None:
    run = made_run(tmp_path, shared=3.3)
    never = f"touch {tmp_path}/never"
    run.run(shell("build", "exit 1"))
    run.run(shell("of the build", never, needs=("build",)))
    run.run(shell("first", "sleep 1", group="shared"))
    run.run(shell("second", never, group="shared"))
    run.run(shell("much larger", never, after=("first", 100.0), limit_s=50.0))
    run.run(shell("a little larger", "true", after=("first", 2.0), limit_s=50.0))
    run.run(shell("of what did not end", never, after=("second", 0.1)))
    assert statuses(run) == {
        **{"build": "failed", "of the build": "not started", "first": "ok", "second": "not started"},
        **{"much larger": "left out", "a little larger": "ok", "of what did not end": "left out"},
    }
    assert not (tmp_path / "never").exists()
    assert [line.partition(":")[0] for line in run.finish()] == ["build", "of the build", "second"]


# --- the script


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Returns a tree with the script, in which every step takes no time."""
    for folder in ("tests/gpu", "tests/support", "benchmarks", "build/gpu/wheels"):
        (tmp_path / folder).mkdir(parents=True)
    for name in OF_RUN:
        shutil.copy(ROOT / "tests" / "gpu" / name, tmp_path / "tests" / "gpu")
    shutil.copy(ROOT / "tests" / "support" / "timed_steps.py", tmp_path / "tests" / "support")
    (tmp_path / "setup.py").write_text("print('built')\n")
    group = '["pytest>=8", "setuptools>=9999", "not-there==1.0", "of-another-python"]'
    (tmp_path / "pyproject.toml").write_text(f"[dependency-groups]\ngpu = {group}\n")
    stall = {"seconds": {"ceiling": [0.1], "ours": [0.2, 0.3, 0.2], "dcp": [2.0]}, "kernel_s": None}
    stall |= {"num_bytes": 330_000_000, "num_tensors": 20_000}
    compared = {"dcp-2": {"save": [2.0], "load": [1.0]}, "bytecheckpoint": {"save": [0.5], "load": []}}
    contents: dict[str, Any] = {
        "tests/gpu/run_machine.py": MACHINE,
        "benchmarks/gpu_stall.py": {"command": "python benchmarks/gpu_stall.py", "figures": {"small": stall}},
        "benchmarks/compare.py": {
            **{"command": "python benchmarks/compare.py", "seconds": compared, "num_bytes": 10**9, "num_tensors": 89},
            "labels": {"dcp-2": "DCP, 2 threads", "bytecheckpoint": "bytecheckpoint"},
        },
        "benchmarks/load_hf.py": {
            **{"command": "python benchmarks/load_hf.py", "bytes": 10**9, "device": "cuda"},
            "seconds": {"bytecheckpoint": [0.25], "safetensors.load_file": [0.5]},
            "left_out": {"fastsafetensors": "fastsafetensors is not installed"},
        },
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(WRITES_JSON.format(content=json.dumps(content)))
    return tmp_path


def add_test(tree: Path, name: str, text: str, date: str = "") -> None:
    """Adds a file of tests, and commits it at a date if there is one."""
    (tree / "tests" / "gpu" / name).write_text(text)
    if date:
        identity = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        for words in (["init", "-q"], ["add", f"tests/gpu/{name}"], ["commit", "-q", "-m", name]):
            subprocess.run(["git", "-C", tree, *words], env={**os.environ, **identity, **dates}, check=True)


def call(tree: Path, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, str(tree / "tests" / "gpu" / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def listed_tests(tree: Path) -> Sequence[str]:
    return [line.removeprefix("tests/gpu/") for line in call(tree, "--list").splitlines() if "/test_" in line]


def test_what_changed_last_is_tested_first(tree: Path) -> None:
    for name, date in (("test_b.py", "2026-01-02"), ("test_a.py", "2026-01-01"), ("test_c.py", "2026-01-03")):
        add_test(tree, name, PASSES, f"{date}T00:00:00Z")
    add_test(tree, "test_new.py", PASSES)
    assert listed_tests(tree) == ["test_new.py", "test_c.py", "test_b.py", "test_a.py"]
    (tree / "tests/gpu/test_a.py").write_text(HANGS)
    assert listed_tests(tree) == ["test_a.py", "test_new.py", "test_c.py", "test_b.py"]


def test_without_a_repository_the_order_is_what_was_prepared(tree: Path) -> None:
    for name in ("test_a.py", "test_b.py", "test_new.py"):
        add_test(tree, name, PASSES)
    order = ["tests/gpu/test_b.py", "tests/gpu/test_a.py"]
    (tree / "build/gpu/wheels/prepared.json").write_text(json.dumps({"commit": "abc", "tests": order}))
    assert listed_tests(tree) == ["test_new.py", "test_b.py", "test_a.py"]


def test_what_this_python_lacks_is_installed_from_wheels(tree: Path) -> None:
    add_test(tree, "test_a.py", "import not_there\n\n\n" + PASSES)
    wheels = tree / "build" / "gpu" / "wheels"
    made = {"pytest-9.0.0": "py3-none", "setuptools-9999.1": "py3-none", "not_there-1.0": "py3-none"}
    for name, tags in {**made, "of_another_python-1.0": "cp299-cp299"}.items():
        package = name.partition("-")[0]
        with zipfile.ZipFile(wheels / f"{name}-{tags}-any.whl", "w") as wheel:
            wheel.writestr(f"{package}/__init__.py", "")
            described = {"METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {name.partition('-')[2]}\n"}
            described |= {"WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}-any\n", "RECORD": ""}
            for file, text in described.items():
                wheel.writestr(f"{name}.dist-info/{file}", text)
    call(tree, "--output", str(tree / "out"), "--only", "test_a")
    report = json.loads((tree / "out/report.json").read_text())
    assert report["steps"][0]["why"] == "they are of another Python: of_another_python"
    assert [word.rpartition("/")[2] for word in report["steps"][1]["command"].split() if word.endswith(".whl")] == [
        *("not_there-1.0-py3-none-any.whl", "setuptools-9999.1-py3-none-any.whl")
    ]
    assert report["steps"][-1]["figures"]["counts"] == {"passed": 1}


def test_tests_come_before_benchmarks(tree: Path) -> None:
    add_test(tree, "test_a.py", PASSES)
    steps = call(tree, "--list").splitlines()
    assert steps[:4] == ["build", "machine", "tests/gpu/test_a.py", "stall, small"]
    assert call(tree, "--list", "--only", "load of").splitlines() == ["build", "machine", "load of safetensors"]


def test_a_whole_run_has_a_table(tree: Path) -> None:
    add_test(tree, "test_a.py", PASSES)
    add_test(tree, "test_b.py", "import pytest\n\npytest.skip('no such package', allow_module_level=True)\n")
    said = call(tree, "--output", str(tree / "out"))
    assert "all steps have a result" in said
    assert str(tree) not in (tree / "out/report.json").read_text()
    table = call(tree, "--table", str(tree / "out/report.json"))
    assert table.strip() in said
    assert table.startswith("A device, ")
    for row in (
        "| tests/gpu/test_a.py | 1 passed |",
        "| tests/gpu/test_b.py | left out: no such package |",
        "| `BcpStager(overlap=False)`, with checksums | 200.0 ms (10.0 x) |",
        "| DCP, 2 threads | 2.000 s | 1.00 | 1.000 s | 1.00 |",
        "| bytecheckpoint | 0.500 s | 4.00 | | |",
        "| bytecheckpoint | 0.250 s | 4.00 GB/s | 2.00 |",
        "| fastsafetensors | left out: fastsafetensors is not installed | | |",
    ):
        assert row in table, table


def test_a_run_without_time_keeps_what_was_done(tree: Path) -> None:
    add_test(tree, "test_old.py", PASSES, "2026-01-01T00:00:00Z")
    add_test(tree, "test_new.py", HANGS)
    said = call(tree, "--limit-s", "6", "--output", str(tree / "out"), code=1)
    report = json.loads((tree / "out/report.json").read_text())
    by_name = {entry["name"]: entry for entry in report["steps"]}
    assert by_name["machine"]["figures"] == MACHINE
    newest = by_name["tests/gpu/test_new.py"]
    assert newest["why"] == "stopped at its limit in tests/gpu/test_new.py::test_hangs, after 1 tests"
    assert newest["figures"]["counts"] == {"passed": 1}
    assert by_name["tests/gpu/test_old.py"]["why"] == "no time is left"
    assert "MISSING: tests/gpu/test_new.py: failed" in said
    assert "| stall, small | not started: no time is left | |" in call(tree, "--table", str(tree / "out/report.json"))


def test_without_a_build_nothing_is_run(tree: Path) -> None:
    add_test(tree, "test_a.py", PASSES)
    (tree / "setup.py").write_text("raise SystemExit('no compiler')\n")
    said = call(tree, "--output", str(tree / "out"), code=1)
    assert "| build | failed: exit status 1: no compiler |" in said
    assert "| tests/gpu/test_a.py | not started: it needs 'machine' | |" in said


def test_a_failing_test_fails_the_run_and_the_rest_goes_on(tree: Path) -> None:
    add_test(tree, "test_a.py", "def test_fails():\n    assert False\n\n\n" + PASSES)
    said = call(tree, "--output", str(tree / "out"), code=1)
    assert "MISSING: tests/gpu/test_a.py: failed, tests/gpu/test_a.py::test_fails" in said
    assert "MISSING: no file of tests/gpu passed" in said
    assert said.count("MISSING") == 2
    assert "| tests/gpu/test_a.py | 1 failed, 1 passed: tests/gpu/test_a.py::test_fails |" in said

# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp report``: what it prints, where it writes, which records it takes, and that it follows a journal."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from support.cli_runs import HOSTILE, ROOT, as_json, run, save, start
from support.simulated_journal import Job, Straggler, simulate_load, simulate_save, write_run

from bytecheckpoint import Config, load_state_dict, save_state_dict
from bytecheckpoint.cli import report
from bytecheckpoint.observability import flush
from bytecheckpoint.observability.run_folder import read_run


def records_of(saves: int) -> list[dict[str, Any]]:
    """Returns saves of steps 10, 20, ..., in the last of which rank 2 is slow."""
    slow = Straggler("slow_storage", (2,), 4.0)
    return [
        simulate_save(Job(4), at, step=10 * at, at=1e9 + 60 * at, straggler=slow if at == saves else None)
        for at in range(1, saves + 1)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", records_of(5))


def data_of(page: Path) -> dict[str, Any]:
    (packed,) = re.findall(r'id="data">([A-Za-z0-9+/=]+)<', page.read_text(encoding="utf-8"))
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return data


def test_it_says_what_to_look_at_and_where_the_page_is(folder: Path) -> None:
    result = run("report", str(folder))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"{folder}: 5 saves, 0 loads"
    assert lines[1].startswith("newest: save of step 50: ")
    assert re.match(r"- rank 2 on node0 wrote \d\.\d times as slowly as the others", lines[2])
    assert "(in 1 of 5 saves, " in lines[2]
    assert lines[-1] == f"page: {folder}/.bcp/report.html"
    data = data_of(folder / ".bcp" / "report.html")
    assert [call["step"] for call in data["calls"]] == [10, 20, 30, 40, 50]
    assert data["reload_s"] == 0
    assert sorted(path.name for path in (folder / ".bcp").iterdir()) == ["journal.jsonl", "report.html"]


def test_a_healthy_run(tmp_path: Path) -> None:
    result = run("report", str(write_run(tmp_path / "run", records_of(5)[:4])))
    assert "Nothing stands out." in result.output


def test_output_and_where_nothing_can_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.html"
    assert run("report", str(folder), "-o", str(other)).output.endswith(f"page: {other}\n")
    assert len(data_of(other)["calls"]) == 5
    (folder / ".bcp" / "report.html").mkdir()  # what stands in the way of the page
    monkeypatch.chdir(tmp_path)
    assert run("report", str(folder)).output.endswith("page: report.html\n")
    assert len(data_of(tmp_path / "report.html")["calls"]) == 5
    result = run("report", str(folder), "-o", str(tmp_path / "none" / "report.html"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert [path.name for path in (folder / ".bcp").glob(".*")] == []  # no half-written file


def test_without_plotly_there_is_the_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is an error only if somebody asked for one."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    said = run("report", str(folder))
    assert (said.exit_code, said.stderr) == (0, "")
    lines = said.output.splitlines()
    assert lines[0] == f"{folder}: 5 saves, 0 loads"
    assert lines[-1] == "the page needs plotly, which is not installed: pip install 'bytecheckpoint-dcp[report]'"
    for options in (["-o", "page.html"], ["--follow"]):
        said = run("report", str(folder), *options)
        assert (said.exit_code, "pip install 'bytecheckpoint-dcp[report]'" in said.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def in_parts(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records of saves by ``bytecheckpoint.save``, of which each part has one."""
    return [
        {**record, "path": f"{record['path']}/{part}", "save_id": f"{record['save_id']}{at}"}
        for record in records
        for at, part in enumerate(("extra_state", "optimizer", "model"))
    ]


def test_the_parts_of_a_save_are_one_save(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", in_parts(records_of(5)))
    lines = run("report", str(folder)).output.splitlines()
    assert lines[0] == f"{folder}: 5 saves in 15 parts, 0 loads"
    assert lines[1].startswith("newest: save of step 50 (model): ")
    assert "(in 1 of 5 saves, " in lines[2]
    data = data_of(folder / ".bcp" / "report.html")
    assert (data["num_saves"], data["num_loads"]) == (5, 0)
    assert [call["part"] for call in data["calls"]] == ["extra_state", "optimizer", "model"] * 5
    newest = as_json("report", str(folder), "--last", "2")["records"]
    assert [record["step"] for record in newest] == [40] * 3 + [50] * 3


def test_a_step_that_was_saved_twice_is_two_saves(tmp_path: Path) -> None:
    again = [{**record, "at": record["at"] + 1, "save_id": "again" + record["save_id"]} for record in records_of(2)]
    folder = write_run(tmp_path / "run", in_parts([*records_of(2), *again]))
    assert run("report", str(folder)).output.splitlines()[0] == f"{folder}: 4 saves in 12 parts, 0 loads"


def test_a_page_in_the_place_of_a_link(folder: Path, tmp_path: Path) -> None:
    """What the link leads to stays."""
    other = tmp_path / "other.html"
    other.write_text("of somebody else")
    page = tmp_path / "page.html"
    page.symlink_to(other)
    assert run("report", str(folder), "-o", str(page)).exit_code == 0
    assert not page.is_symlink()
    assert "<html" in page.read_text()
    assert other.read_text() == "of somebody else"


def test_json(folder: Path) -> None:
    said = as_json("report", str(folder))
    assert [record["step"] for record in said["records"]] == [10, 20, 30, 40, 50]
    (finding,) = said["records"][-1]["findings"]
    assert (finding["kind"], finding["rank"], finding["phase"]) == ("slow_storage", 2, "write")
    (trouble,) = said["troubles"]
    assert trouble["calls"] == [4]
    written = json.loads((folder / ".bcp" / "journal.jsonl").read_text().splitlines()[-1])
    assert said["records"][-1]["report"]["total_s"] == written["report"]["total_s"]
    assert said["records"][-1]["phases"]["write"]["max"] == max(written["ranks"]["phases"]["write"])
    assert not (folder / ".bcp" / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--last", "2"], [40, 50]),
        (["--since", "30"], [30, 40, 50]),
        (["--since", "20", "--last", "3"], [30, 40, 50]),
        (["--last", "100"], [10, 20, 30, 40, 50]),
    ],
)
def test_which_records(folder: Path, options: list[str], steps: list[int]) -> None:
    assert [record["step"] for record in as_json("report", str(folder), *options)["records"]] == steps


def test_a_rotated_journal_is_read_newest_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    lines = [json.dumps(record) + "\n" for record in records_of(5)]
    for name, some in (("journal.2", lines[:2]), ("journal.1", lines[2:4]), ("journal", lines[4:])):
        (folder / ".bcp" / f"{name}.jsonl").write_text("".join(some))
    assert [record["step"] for record in read_run(folder).records] == [10, 20, 30, 40, 50]
    (folder / ".bcp" / "journal.2.jsonl").write_bytes(b"\xff" * 100)  # it is not looked at
    read = read_run(folder, last=3)
    assert ([record["step"] for record in read.records], read.num_skipped) == ([30, 40, 50], 0)


def test_a_folder_that_holds_nothing_but_a_journal(folder: Path) -> None:
    result = run("report", str(folder / ".bcp"))
    assert result.output.endswith(f"page: {folder}/.bcp/report.html\n")
    assert [call["is_there"] for call in data_of(folder / ".bcp" / "report.html")["calls"]] == [None] * 5


def test_torn_and_foreign_lines_are_counted(folder: Path) -> None:
    journal = folder / ".bcp" / "journal.jsonl"
    whole = journal.read_bytes()
    foreign = [b"5", b"[]", b'{"kind": "other", "at": 1}', b'{"kind": "save"}', b"\xff\xfe", b"[" * 100_000]
    journal.write_bytes(b"\n".join(foreign) + b"\n" + whole + whole[:1000])
    result = run("report", str(folder))
    assert result.output.splitlines()[0].endswith(": 5 saves, 0 loads; 7 lines of the journal could not be read")
    assert data_of(folder / ".bcp" / "report.html")["skipped"] == 7


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--trace", "trace.json"]])
def test_without_a_journal_one_sentence_says_how_one_comes_to_be(tmp_path: Path, arguments: list[str]) -> None:
    result = run("report", str(tmp_path), *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "has no journal" in result.stderr
    assert "each save adds a line to .bcp/journal.jsonl in the folder of its checkpoint" in result.stderr


def test_other_refusals(folder: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ([str(tmp_path / "none")], "no such run folder"),
        ([str(folder), "--since", "1000"], "no save and no load of step 1000 or later"),
        ([str(folder), "--follow", "--json"], "--follow writes a page"),
        ([str(folder), "--last", "0"], "0"),
        (["s3://bucket/run"], "object store"),
    ):
        result = run("report", *arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), arguments
        assert said in result.stderr


def test_hostile_text_is_escaped_in_words(tmp_path: Path) -> None:
    record = records_of(1)[0] | {"path": HOSTILE, "step": None, "hosts": [HOSTILE] * 2}
    record["report"]["warnings"] = [HOSTILE]
    output = run("report", str(write_run(tmp_path / "run", [record]))).output
    assert not {"\x1b", "\u202e", "\x9b", "\u05d0"} & {*output}
    assert len(output.splitlines()) == 6  # what they say, and no line more


def test_a_trace(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert run("report", str(folder), "--trace", str(trace)).output.endswith(f"trace: {trace}\n")
    assert not (folder / ".bcp" / "report.html").exists()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {f"save step {step}" for step in (10, 20, 30, 40, 50)} <= {event["name"] for event in events}
    page = tmp_path / "page.html"
    run("report", str(folder), "--trace", str(trace), "-o", str(page))
    assert page.exists()


def test_the_largest_tensors_of_the_newest_checkpoint(folder: Path) -> None:
    save(folder / "step_30")
    assert flush()
    run("report", str(folder))
    data = data_of(folder / ".bcp" / "report.html")
    assert data["tensors"]["path"] == "step_30"
    assert data["tensors"]["rows"][0] == ["model.embed", "float32", "[20, 30]", 2400, 1]
    # The last is the save itself, which has added a line.
    assert [call["is_there"] for call in data["calls"]] == [False, False, True, False, False, True]


def test_what_the_steps_take_on_disk(folder: Path) -> None:
    for step in (30, 40):
        save(folder / f"step_{step}", config=Config(journal="off"))
    linked = folder / "step_50"
    linked.mkdir()
    for file in (folder / "step_40").iterdir():
        os.link(file, linked / file.name)
    (folder / "step_30" / "__7_0.0123456789abcdef.distcp").write_bytes(bytes(5000))  # what a dead save left
    assert flush()
    run("report", str(folder))
    told = data_of(folder / ".bcp" / "report.html")["space"]
    du = as_json("du", str(folder), code=1)
    assert (told["allocated_bytes"], told["shared_bytes"]) == (du["allocated_bytes"], du["shared_bytes"])
    assert told["shared_bytes"] > 0
    assert [(step["path"], step["step"], step["is_readable"]) for step in told["steps"]] == [
        ("step_30", 30, True),
        ("step_40", 40, True),
        ("step_50", 50, True),
    ]
    assert [step["own_bytes"] > 0 for step in told["steps"]] == [True, False, False]
    assert [step["linked_bytes"] for step in told["steps"]] == [0, told["shared_bytes"], told["shared_bytes"]]
    assert [step["unnamed_bytes"] for step in told["steps"]] == [5000, 0, 0]


def test_a_journal_that_saves_and_loads_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the page is written here: no folder is made for it between the steps
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (1, 2):
        save_state_dict(str(folder / f"step_{step}"), {"w": torch.arange(100_000.0), "step": step})
    load_state_dict(str(folder / "step_2"), {"w": torch.zeros(100_000), "step": 0})
    assert flush()
    said = as_json("report", str(folder))
    assert [(record["kind"], record["step"]) for record in said["records"]] == [("save", 1), ("save", 2)]
    assert {"copy", "checksum", "write"} <= said["records"][0]["phases"].keys()
    assert run("report", str(folder)).output.splitlines()[0] == f"{folder}: 2 saves, 0 loads"
    data = data_of(tmp_path / "report.html")
    assert [call["is_there"] for call in data["calls"]] == [True, True]
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]
    assert data["tensors"]["rows"][0][:2] == ["w", "float32"]
    assert all(call["timelines"] for call in data["calls"])


def test_follow_writes_the_page_again(folder: Path) -> None:
    command = start("report", str(folder), "--follow", "--interval", "0.1", environment={"PYTHONUNBUFFERED": "1"})
    assert command.stdout is not None
    try:
        for line in command.stdout:
            if line.startswith("page: "):
                break
        page = folder / ".bcp" / "report.html"
        assert data_of(page)["reload_s"] == pytest.approx(0.1)
        with (folder / ".bcp" / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps(simulate_load(Job(4), 9, step=60, at=2e9)) + "\n")
        assert command.stdout.readline().startswith("load of step 60: ")
        assert data_of(page)["calls"][-1]["step"] == 60
    finally:
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130
        command.communicate()


def test_what_is_recorded_while_the_first_page_is_written_is_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pages, looks = report._write_page, [], []

    def write_slowly(*arguments: Any) -> Path:
        pages.append(write(*arguments))
        if len(pages) == 2:
            raise KeyboardInterrupt
        with (folder / ".bcp" / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps(simulate_load(Job(4), 9, step=60, at=2e9)) + "\n")
        return pages[-1]

    def look(_: float) -> None:
        looks.append(1)
        assert len(looks) < 3, "the record was taken for one that was there before"

    monkeypatch.setattr(report, "_write_page", write_slowly)
    monkeypatch.setattr("time.sleep", look)
    with pytest.raises(click.Abort):
        CliRunner().invoke(report.command, [str(folder), "--follow"], standalone_mode=False, catch_exceptions=False)
    assert data_of(pages[-1])["calls"][-1]["step"] == 60


def in_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``bcp report`` after some code."""
    script = (
        f"import sys\n{code}\nfrom bytecheckpoint.cli.app import run\nsys.argv = ['bcp', 'report', {str(folder)!r}]\n"
    )
    script += "from bytecheckpoint.cli import report\nimport sysconfig\nafter()\nsys.exit(run())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)


def test_without_torch(folder: Path) -> None:
    ran = in_python("sys.modules['torch'] = None\ndef after(): pass", folder)
    assert ran.returncode == 0, ran.stderr
    assert "page: " in ran.stdout


def test_without_plotly_the_words_are_still_there(folder: Path) -> None:
    code = "def after(): sys.path[:] = [path for path in sys.path if 'site-packages' not in path]"
    ran = in_python(code, folder)
    assert ran.returncode == 0
    assert "rank 2 on node0" in ran.stdout
    assert "pip install 'bytecheckpoint-dcp[report]'" in ran.stdout

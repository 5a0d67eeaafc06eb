# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp bench disk``: it measures, keeps the result where reports look, and leaves no file behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.cli_runs import as_json, run, save, start

from bytecheckpoint.cli import raw_disk
from bytecheckpoint.cli.raw_disk import Disk, nameless_file
from bytecheckpoint.observability.observers import flush
from bytecheckpoint.observability.run_folder import read_run

QUICK = ("--size", "8", "--rounds", "1")
FIELDS = {
    *("format", "at", "host", "write_gb_per_s", "read_gb_per_s", "both_gb_per_s", "fsync_s", "num_bytes", "direct_io"),
    *("num_threads", "rounds"),
}


def test_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = as_json("bench", "disk", str(tmp_path), *QUICK)
    assert told.keys() == FIELDS | {"saved"}
    assert told["saved"] is None
    assert all(told[name] > 0 for name in FIELDS - {"host", "direct_io"})
    assert (told["format"], told["num_bytes"], told["host"]) == (1, 8 << 20, socket.gethostname())
    monkeypatch.setenv("BYTECHECKPOINT_JOURNAL_HOSTS", "0")
    assert as_json("bench", "disk", str(tmp_path), *QUICK)["host"] == "host 0"
    assert [*tmp_path.iterdir()] == []
    lines = run("bench", "disk", str(tmp_path), *QUICK).output.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == ["write and sync", "read", "both at once", "sync of 4 KiB"]


def test_the_result_of_a_run_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "run" / "step-1")
    assert flush()
    told = as_json("bench", "disk", str(tmp_path / "run"), *QUICK)
    kept = tmp_path / "run" / "step-1" / ".bcp" / "disk.json"
    assert told.pop("saved") == str(kept)
    assert json.loads(kept.read_text()) == told
    assert {path.name for path in kept.parent.iterdir()} == {"disk.json", "journal.jsonl"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-1"}
    assert read_run(tmp_path / "run").disk == told
    kept.write_text("older")
    assert as_json("bench", "disk", str(tmp_path / "run"), *QUICK, "--no-save")["saved"] is None
    assert kept.read_text() == "older"
    run("bench", "disk", str(tmp_path / "run"), *QUICK)
    assert json.loads(kept.read_text()).keys() == FIELDS
    assert as_json("bench", "disk", str(tmp_path), *QUICK, "--save")["saved"] == str(tmp_path / ".bcp" / "disk.json")
    # What somebody asked for is used from then on.
    assert as_json("bench", "disk", str(tmp_path), *QUICK)["saved"] == str(tmp_path / ".bcp" / "disk.json")


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = {
        (str(tmp_path), "--size", "999999999"): " are free, and two files of 1048.58 TB must leave half of that",
        (str(tmp_path / "absent"),): "is not a folder",
        (str(tmp_path / "file"),): "is not a folder",
        ("s3://bucket/run",): "is in an object store",
    }
    for arguments, why in refused.items():
        result = run("bench", "disk", *arguments)
        assert result.exit_code == 2
        assert why in result.stderr
    assert run("bench").stderr == "bcp: Missing command. See bcp bench --help\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_when_it_is_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    process = start("bench", "disk", str(tmp_path), "--size", "8", "--rounds", "100000000")
    fds = Path(f"/proc/{process.pid}/fd")

    def is_writing() -> bool:
        with suppress(FileNotFoundError):  # it closes them, or has ended
            return any(str(fd.readlink()).startswith(str(tmp_path)) for fd in fds.iterdir())
        return False

    while process.poll() is None and not is_writing():
        time.sleep(0.01)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert [*tmp_path.iterdir()] == []
    if how == signal.SIGINT:
        assert (process.returncode, said) == (130, "bcp: interrupted\n")


def test_the_page_cache_where_direct_io_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(22, os.strerror(22))

    monkeypatch.setattr(raw_disk, "use_direct_io", refuse)
    assert as_json("bench", "disk", str(tmp_path), *QUICK)["direct_io"] is False
    assert "through the page cache" in run("bench", "disk", str(tmp_path), *QUICK).output


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_written_is_read(tmp_path: Path, num_threads: int) -> None:
    """All of the file is written, and a shorter file is an error."""
    told: list[int] = []
    disk = Disk(num_threads, progress=told.append)
    with nameless_file(tmp_path) as fd:
        disk.write_to(fd, (20 << 20) + 1, direct_io=False)
        assert os.fstat(fd).st_size == sum(told) == (20 << 20) + 4096
        assert os.pread(fd, 4096, 20 << 20) != bytes(4096)
        disk.read_from(fd, 20 << 20)
        os.ftruncate(fd, 10 << 20)
        # Whichever thread meets the end first.
        with pytest.raises(OSError, match=r"request at (8388608|16777216): wanted \d+ bytes, got (2097152|0)"):
            disk.read_from(fd, 20 << 20)

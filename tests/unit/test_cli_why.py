# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp why``: what it says of a piece is what is in the file, and what the journal says of the save."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.cli_runs import HOSTILE, as_json, run, save, stock
from torch import nn

import bytecheckpoint
from bytecheckpoint.native import _core
from bytecheckpoint.observability import flush

VALUE = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "jobs" / "run" / "step_5"  # journals are looked for in it, and in the three folders above
    save(path, {"model": {"embed": VALUE, "bias": torch.arange(7.0)}, "step": 5, HOSTILE: torch.ones(3)})
    assert flush()  # its own record is in the journal
    return path


def record_of(step: Path, **changed: Any) -> dict[str, Any]:
    """Returns a record as the journal has it, of a save by two ranks."""
    return {
        "format": 1,
        "kind": "save",
        "at": 1764088000.25,
        "path": step.name,
        "step": 5,
        "save_id": _core.Checkpoint.open(str(step)).save_id,
        "world_size": 2,
        "rank": 0,
        "hosts": ["node7", "node8"],
        "ranks": {
            "rank": [1, 0],
            "host": [0, 1],
            "num_bytes": [5, 3_000_000_000],
            "arrived_s": [0.0, 0.5],
            "ended_s": [9.0, 2.0],
            "phases": {"write": [7.0, 2.5]},
        },
        **changed,
    }


def write_journal(run_folder: Path, *lines: object, name: str = "journal.jsonl") -> None:
    folder = run_folder / ".bcp"
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / name).write_text(text)


def test_a_tensor(step: Path) -> None:
    told = as_json("why", str(step), "model.embed")
    (item,) = told["items"]
    (chunk,) = item["chunks"]
    assert (item["name"], item["dtype"], item["shape"], item["bytes"]) == (
        "model.embed",
        "float32",
        [300, 1000],
        1_200_000,
    )
    assert (chunk["offsets"], chunk["sizes"], chunk["rank"]) == ([0, 0], [300, 1000], 0)
    content = (step / chunk["file"]).read_bytes()
    begin = chunk["elements_offset"]
    assert content[begin : begin + chunk["elements_bytes"]] == VALUE.numpy().tobytes()
    assert content[chunk["offset"] : chunk["offset"] + 2] == b"PK"
    blocks = chunk["blocks"]
    size = blocks["block_bytes"]
    assert blocks["offset"] == blocks["first"] * size <= chunk["offset"]
    assert blocks["end"] >= chunk["offset"] + chunk["bytes"]
    ends = [min((number + 1) * size, blocks["end"]) for number in range(blocks["first"], blocks["last"] + 1)]
    crcs = [f"{zlib.crc32(content[number * size : end]):08x}" for number, end in enumerate(ends, blocks["first"])]
    assert blocks["crc32"] == crcs
    assert len(crcs) == 5
    assert told["notes"] == []
    journal = str(step)
    assert (chunk["written"]["journal"], chunk["written"]["num_bytes"]) == (journal, len(content))
    assert chunk["written"]["seconds"] > 0
    text = run("why", str(step), "model.embed").output
    assert f"CRC-32 {', '.join(crcs[:4])} and 1 more" in text
    assert "written by rank 0 on " in text


def test_patterns_and_objects(step: Path) -> None:
    assert [item["name"] for item in as_json("why", str(step), "model.*")["items"]] == ["model.bias", "model.embed"]
    (chunk,) = as_json("why", str(step), "step")["items"][0]["chunks"]
    assert (chunk["sizes"], chunk["elements_offset"]) == ([], None)
    assert [item["name"] for item in as_json("why", str(step), HOSTILE)["items"]] == [HOSTILE]
    assert "\x1b" not in run("why", str(step), HOSTILE).output


def test_unknown_names(step: Path, tmp_path: Path) -> None:
    refused = {
        (str(step), "model.embde"): "'model.embde' is not in",
        (str(step), "emb"): "the nearest are model.embed",
        (str(step), "zzzzzzzz"): "bcp ls lists the names",
        (str(step.parent), "model.embed"): "pass",
        (str(tmp_path / "absent"), "a"): "no checkpoint there",
    }
    for arguments, why in refused.items():
        result = run("why", *arguments)
        assert result.exit_code == 2
        assert why in result.stderr
    assert "the nearest are model.embed" in run("why", str(step), "model.embde").stderr


def test_the_journal_says_who_wrote_it(step: Path) -> None:
    older = record_of(step, save_id="0" * 32)
    write_journal(step, older, '{"torn": ', record_of(step), older)
    told = as_json("why", str(step), "model.embed")
    assert told["notes"] == []
    assert told["items"][0]["chunks"][0]["written"] == {
        "began": "2025-11-25 16:26:40 UTC",
        "journal": str(step),
        "host": "node8",
        "num_bytes": 3_000_000_000,
        "seconds": 1.5,
        "gb_per_s": 2.0,
        "write_s": 2.5,
        "write_gb_per_s": 1.2,
    }
    assert (
        "written by rank 0 on node8, in the save that began 2025-11-25 16:26:40 UTC; which took it 1.50 s for 3.00 GB, "
        "2.00 GB/s; 2.50 s of its threads in writes"
    ) in run("why", str(step), "model.embed").output


def test_the_journal_of_a_run_of_an_older_version_is_read(step: Path) -> None:
    (step / ".bcp").rename(step.parent / ".bcp")
    assert as_json("why", str(step), "step")["items"][0]["chunks"][0]["written"]["journal"] == str(step.parent)


def test_older_journals_are_looked_through(step: Path, tmp_path: Path) -> None:
    write_journal(step, record_of(step, save_id="0" * 32))
    assert "has no record of this save" in as_json("why", str(step), "step")["notes"][0]
    write_journal(step, record_of(step), name="journal.2.jsonl")
    write_journal(step, "{}", name="journal.1.jsonl")
    assert as_json("why", str(step), "step")["items"][0]["chunks"][0]["written"]["host"] == "node8"
    (step / ".bcp").rename(tmp_path / "kept")
    assert "there is no journal: no folder .bcp in" in as_json("why", str(step), "step")["notes"][0]
    told = as_json("why", str(step), "step", "--journal", str(tmp_path / "kept"))
    assert told["items"][0]["chunks"][0]["written"]["host"] == "node8"
    assert run("why", str(step), "step", "--journal", str(tmp_path / "absent")).exit_code == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"ranks": None},
        {"ranks": {"rank": "01"}},
        {"ranks": {"rank": [0], "host": [9], "num_bytes": ["many"], "phases": []}},
        {"ranks": {"rank": [0], "host": [], "arrived_s": [1.0], "ended_s": [1.0], "num_bytes": [3]}, "hosts": 3},
        {"at": 1e300},
        {"at": "now"},
        {"kind": "load"},
        {"format": 99, "unknown": {}},
    ],
)
def test_records_that_others_wrote(step: Path, changed: dict[str, Any]) -> None:
    """Missing and strange fields are left out."""
    write_journal(step, record_of(step, **changed))
    result = run("why", str(step), "model.embed")
    assert result.exit_code == 0
    assert "written by rank 0" in result.output
    assert as_json("why", str(step), "model.embed")["items"]


def test_a_journal_that_cannot_be_read(step: Path) -> None:
    (step / ".bcp" / "journal.jsonl").unlink()
    (step / ".bcp" / "journal.jsonl").mkdir()
    result = run("why", str(step), "step")
    assert f"bcp: warning: a journal is left out: read({step}/.bcp/journal.jsonl): must be a regular" in result.output
    assert f"note: the journal in {step} has no record of this save" in result.output


def test_parts_of_a_step(tmp_path: Path) -> None:
    """Each part was a save of its own, with a journal of its own."""
    model = nn.Linear(3, 2)
    bytecheckpoint.save(
        tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters())}, "ddp", global_steps=7
    )
    assert flush()
    step = tmp_path / "global_step_7"
    for chunks in (item["chunks"] for item in as_json("why", str(step), "*weight*")["items"]):
        assert all(chunk["written"]["num_bytes"] > 0 for chunk in chunks)
    write_journal(step / "model", record_of(step / "model"))
    write_journal(step / "optimizer", "{}")
    (item,) = as_json("why", str(step), "model: weight")["items"]
    assert (item["part"], item["chunks"][0]["written"]["host"]) == ("model", "node8")
    told = as_json("why", str(step), "*weight*")
    assert {item["part"] for item in told["items"]} == {"model", "optimizer"}
    assert all(("written" in item["chunks"][0]) == (item["part"] == "model") for item in told["items"])
    assert len(told["notes"]) == 1
    assert as_json("why", str(step / "model"), "weight")["items"][0]["chunks"][0]["written"]["host"] == "node8"


def test_other_writers(tmp_path: Path) -> None:
    (item,) = as_json("why", stock("2.13.0-plain"), as_json("ls", stock("2.13.0-plain"))["items"][0]["name"])["items"]
    assert (item["format"], item["save_id"], item["chunks"][0]["blocks"], item["chunks"][0]["rank"]) == (
        "dcp",
        None,
        None,
        0,
    )
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "m.safetensors")
    told = as_json("why", str(tmp_path), "b")
    (chunk,) = told["items"][0]["chunks"]
    assert (chunk["file"], chunk["rank"], chunk["elements_bytes"]) == ("m.safetensors", None, 16)
    assert (tmp_path / "m.safetensors").read_bytes()[chunk["elements_offset"] :][:16] == torch.ones(4).numpy().tobytes()
    assert "another writer made the checkpoint" in told["notes"][0]


def test_files_that_are_damaged_or_missing(step: Path) -> None:
    (data,) = step.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-10] + bytes(10))
    assert "its checksums cannot be read: " in run("why", str(step), "model.bias").output
    data.unlink()
    (chunk,) = as_json("why", str(step), "model.bias")["items"][0]["chunks"]
    assert chunk["blocks"] is None
    assert data.name in chunk["problem"]

# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp ls``: it lists what a checkpoint holds, from its metadata alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import HOSTILE, STOCK, as_json, run, save, stock

import bytecheckpoint
from bytecheckpoint import BcpWriter
from bytecheckpoint.cli.text import one_line, safe_name
from bytecheckpoint.load_spec.patterns import matches


def test_tensors_and_objects(tmp_path: Path) -> None:
    listed = as_json("ls", save(tmp_path))
    items = {item["name"]: item for item in listed["items"]}
    assert list(items) == sorted(items, key=str.encode)
    assert items["model.embed"] == {
        "name": "model.embed",
        "part": None,
        "rank": None,
        "kind": "tensor",
        "dtype": "float32",
        "shape": [20, 30],
        "bytes": 2400,
        "shards": 1,
    }
    assert items["step"]["kind"] == "object"
    assert items["step"]["dtype"] is items["step"]["shape"] is None
    assert items[HOSTILE]["bytes"] == 6
    assert listed["format"] == "bytecheckpoint"
    assert len(listed["save_ids"]) == 1
    assert listed["totals"]["bytes"] == sum(item["bytes"] for item in items.values())
    assert listed["totals"]["tensors"] == 3


def test_shards_say_where_records_are(tmp_path: Path) -> None:
    path = save(tmp_path)
    places = dcp.FileSystemReader(path).read_metadata().storage_data
    for item in as_json("ls", path, "--shards")["items"]:
        (chunk,) = item["chunks"]
        (place,) = (place for index, place in places.items() if index.fqn == item["name"])
        assert (chunk["file"], chunk["offset"], chunk["bytes"]) == (place.relative_path, place.offset, place.length)
        assert chunk["sizes"] == (item["shape"] or [])
    (file,) = tmp_path.glob("*.distcp")
    assert f"[0:20, 0:30] {file.name} at " in run("ls", path, "--shards").output


def test_text(tmp_path: Path) -> None:
    lines = run("ls", save(tmp_path)).output.splitlines()
    assert lines[0].split() == ["NAME", "DTYPE", "SHAPE", "BYTES", "SHARDS"]
    assert any(line.split() == ["model.embed", "float32", "[20,", "30]", "2,400", "1"] for line in lines)
    assert lines[-1].startswith("3 tensors, ")
    assert lines[-1].endswith("of 1 file by bytecheckpoint")


def test_patterns_and_order(tmp_path: Path) -> None:
    path = save(tmp_path)

    def names(*arguments: str) -> list[str]:
        return [item["name"] for item in as_json("ls", path, *arguments)["items"]]

    assert names("model.*") == ["model.bias", "model.embed"]
    assert names("model.*", "--sort", "size") == ["model.embed", "model.bias"]
    assert names("model.*", "--reverse") == ["model.embed", "model.bias"]
    assert names("step", "*.bias") == ["model.bias", "step"]
    said = run("ls", path, "MODEL.*", "step", "x\n")
    assert said.exit_code == 1
    assert said.stderr.splitlines() == [f"bcp: no name in {path} matches '{name}'" for name in ("MODEL.*", "x\\n")]
    assert "step" in said.stdout
    assert as_json("ls", path, "MODEL.*", code=1)["items"] == []


@pytest.mark.parametrize(
    "pattern",
    ["model", "model.layers", "model.*", "*.bias", "layers", "model.layers.{i}", "model.{x}.0", "re:.*bias"],
)
def test_a_pattern_means_the_same_everywhere(tmp_path: Path, pattern: str) -> None:
    """``ls``, ``why``, ``convert --include`` and ``read`` take the same keys."""
    layers = {f"{number}": {"w": torch.ones(2), "bias": torch.zeros(1)} for number in range(2)}
    path = save(tmp_path / "ckpt", {"model": {"layers": layers, "bias": torch.ones(1)}, "models": torch.ones(1)})
    everything = [item["name"] for item in as_json("ls", path)["items"]]
    wanted = {name for name in everything if matches(pattern, name)}
    assert {item["name"] for item in as_json("ls", path, pattern, code=0 if wanted else 1)["items"]} == wanted
    if not wanted:
        assert run("why", path, pattern).exit_code == 2
        assert run("convert", path, str(tmp_path / "hf"), "--include", pattern).exit_code == 2
        return
    assert {item["name"] for item in as_json("why", path, pattern)["items"]} == wanted
    assert set(bytecheckpoint.read(path, include=pattern)) == wanted
    as_json("convert", path, str(tmp_path / "hf"), "--include", pattern)
    assert {item["name"] for item in as_json("ls", str(tmp_path / "hf"))["items"]} == wanted


def test_what_is_no_pattern(tmp_path: Path) -> None:
    path = save(tmp_path, {"odd{ name}": torch.ones(1)})
    for arguments in (("ls", path, "a{ b}"), ("ls", path, "re:("), ("why", path, "a{ b}")):
        result = run(*arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert "pattern" in result.stderr
    assert as_json("why", path, "odd{ name}")["items"]  # a name goes first


def test_checkpoints_of_others() -> None:
    for folder in sorted(STOCK.iterdir()):
        result = run("ls", str(folder), "--shards", "--json")
        if "compressed" in folder.name:  # a stream extension compressed it: refused, in one line
            assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
            continue
        assert result.exit_code == 0, folder
        listed = json.loads(result.stdout)
        assert (listed["format"], listed["save_ids"]) == ("dcp", [])
        assert listed["totals"]["tensors"] > 0


def test_parts_of_ranks() -> None:
    path = stock("2.13.0-no_collectives")
    listed = as_json("ls", path)
    assert {item["rank"] for item in listed["items"]} == {0, 1}
    assert "rank 1: " in run("ls", path).output


def test_hostile_names(tmp_path: Path) -> None:
    output = run("ls", save(tmp_path)).output
    assert one_line(output.replace("\n", "")) == output.replace("\n", "")
    assert r"a\n\x1b[31m\u202eb\u05d0\\n\x9b'" in output
    assert len(output.splitlines()) == 5 + 2, "header and totals"
    assert as_json("ls", str(tmp_path), "a*")["items"][0]["name"] == HOSTILE


@pytest.mark.parametrize(
    "name", ["", " a", "a ", "\n", "\\n", "\ud800", "\u2028", "\u202e", "\x7f", "\u05d0\u05d1", "\U000e0001"]
)
def test_names_are_shown_unlike_each_other(name: str) -> None:
    shown = safe_name(name)
    assert shown.isprintable()
    assert shown.isascii()
    others = {"", " a", "a ", "a", "\n", "\\n", "\ud800", "\u2028"} - {name}
    assert shown not in {safe_name(other) for other in others}


def test_a_long_name_takes_no_space_in_other_rows(tmp_path: Path) -> None:
    """``bcp ls`` shortens the name and says so. --json has all of it."""
    state = {f"layer.{number}": torch.ones(1) for number in range(100)}
    long = {f"model.{'x' * 1_000_000}.{end}": torch.ones(1) for end in ("weight", "bias")}
    like = {f"a{'y' * 150}": torch.ones(1)}
    path = tmp_path / "ckpt"
    dcp.save({**state, **long, **like}, storage_writer=BcpWriter(path), no_dist=True)
    output = run("ls", str(path)).output
    assert len(output) < 100 * 200
    shown = [line for line in output.splitlines() if line.startswith("model.")]
    assert len(set(shown)) == 2
    assert all("[1,000," in line and "characters" in line and line.split()[-2:] == ["4", "1"] for line in shown), shown
    assert next(iter(like)) in output
    names = {item["name"] for item in as_json("ls", str(path))["items"]}
    assert names == {*state, *long, *like}


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "a\nb"):
        result = run("ls", str(path))
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "no checkpoint there" in result.stderr
        assert result.stderr.count("\n") == 1
    (tmp_path / ".metadata").write_bytes(b"what is this")
    result = run("ls", str(tmp_path), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1

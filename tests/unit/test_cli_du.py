# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp du``: what steps take on disk, and what for, adds up to the bytes of their files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.cli_runs import STOCK, as_json, run, save, stock
from torch import nn
from unit.run_folder import DEAD_TMP, RunFolder

import bytecheckpoint
from bytecheckpoint import BcpWriter, Config, Retention
from bytecheckpoint.checkpoint.disk_usage import disk_usage, freed_by

UNFITTING = ("unreferenced_bytes", "unfinished_bytes", "unread_bytes", "other_bytes")


def state() -> dict[str, Any]:
    return {
        "model": {"embed.weight": torch.zeros(300, 400), "head": torch.zeros(9, dtype=torch.bfloat16)},
        "optimizer": {"m": torch.zeros(300, 400)},
        "step": 7,
    }


def bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def keys_of(told: dict[str, Any]) -> dict[tuple[str, str | None], int]:
    return {(row["key"], row["dtype"]): row["bytes"] for row in told["keys"]}


def check_sums(told: dict[str, Any]) -> None:
    """Every byte of each checkpoint is accounted for, once."""
    for each in told["checkpoints"]:
        of_keys = sum(row["bytes"] for row in each["keys"])
        assert each["bytes"] == of_keys + each["overhead"]["bytes"] + sum(each[name] for name in UNFITTING), each
        overhead = dict(each["overhead"])
        assert overhead.pop("bytes") == sum(overhead.values())
        assert each["bytes"] == bytes_of(Path(each["path"])) or not Path(each["path"]).is_dir()
    assert told["bytes"] == sum(each["bytes"] for each in told["checkpoints"])


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template"
    save(path, state(), config=Config(journal="off"))
    return path


@pytest.fixture
def folder(tmp_path: Path, template: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run", template)
    made.complete(1, 2, 3)
    return made


def test_a_checkpoint(template: Path) -> None:
    told = as_json("du", str(template))
    check_sums(told)
    assert (told["kind"], told["findings"]) == ("checkpoint", 0)
    of_step = (template / ".metadata").stat().st_size, next(template.glob("*.distcp")).stat().st_size
    assert keys_of(told) == {
        ("model", "bfloat16"): 18,
        ("model", "float32"): 480_000,
        ("optimizer", "float32"): 480_000,
        ("step", None): keys_of(told)["step", None],
    }
    overhead = told["checkpoints"][0]["overhead"]
    assert overhead["metadata"] == of_step[0]
    assert (overhead["headers"], overhead["block_tables"]) == (4096 + 80, 4 * -(-(of_step[1] - 80) // (256 * 1024 + 4)))
    assert told["allocated_bytes"] == 512 * sum(path.stat().st_blocks for path in template.iterdir())
    deep = keys_of(as_json("du", str(template), "--depth", "2"))
    assert deep["model.embed", "float32"] == 480_000
    assert {key for key, _ in keys_of(as_json("du", str(template), "--depth", "0"))} == {""}
    lines = run("du", str(template)).output.splitlines()
    assert lines[0].split() == ["KEY", "DTYPE", "ITEMS", "BYTES"]
    assert lines[-1].startswith(f"{template}: 2 files, {sum(of_step):,} bytes (")


def test_a_run(folder: RunFolder) -> None:
    (folder.root / "log").write_bytes(b"of the trainer")
    told = as_json("du", str(folder.root))
    check_sums(told)
    assert (told["kind"], told["findings"], told["shared_bytes"]) == ("run", 0, 0)
    assert [each["step"] for each in told["checkpoints"]] == [1, 2, 3]
    assert told["beside"]["bytes"] == 14
    assert {row["key"]: (row["bytes"], row["newest_bytes"]) for row in told["keys"]}["optimizer"] == (
        1_440_000,
        480_000,
    )
    lines = run("du", str(folder.root)).output.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["STEP", "step-1", "step-2", "step-3"]
    assert lines[1].endswith("bytecheckpoint")
    assert lines[-1] == "beside the steps: 1 file, 14 bytes"


def test_what_no_commit_names(folder: RunFolder) -> None:
    """A stray file is unreferenced, unless a tmp says that a save may be writing it."""
    for step in (1, 2):
        (folder.path(step) / "__5_0.0123456789abcdef.distcp").write_bytes(b"stray")
    (folder.path(2) / DEAD_TMP).write_bytes(b"tmp")
    (folder.path(3) / "tokenizer.json").write_bytes(b"{}")
    folder.half(4)
    told = as_json("du", str(folder.root), code=1)
    check_sums(told)
    assert told["findings"] == 1
    first, second, third, half = told["checkpoints"]
    assert (first["unreferenced"], first["unreferenced_bytes"]) == (["__5_0.0123456789abcdef.distcp"], 5)
    assert (second["unreferenced"], second["unfinished_bytes"]) == ([], 8)
    assert third["other_bytes"] == 2
    assert (half["formats"], half["unfinished_bytes"]) == ([], half["bytes"])
    assert "step-1/__5_0.0123456789abcdef.distcp: the checkpoint does not refer" in run("du", str(folder.root)).output
    (folder.path(4) / DEAD_TMP).unlink()
    told = as_json("du", str(folder.root), code=1)
    check_sums(told)
    assert told["checkpoints"][3]["unreferenced_bytes"] == told["checkpoints"][3]["bytes"] > 900_000


def test_checkpoints_that_cannot_be_read(folder: RunFolder) -> None:
    folder.corrupt(4)
    next(folder.path(1).glob("*.distcp")).unlink()
    mark = folder.path(2) / ".metadata"
    mark.write_bytes(mark.read_bytes()[:-1])
    told = as_json("du", str(folder.root), code=1)
    check_sums(told)
    missing, cut_mark, whole, cut_file = told["checkpoints"]
    assert "there is no such file, but the metadata name it" in missing["problems"][0]
    assert (len(cut_mark["problems"]), cut_mark["keys"]) == (1, [])
    assert cut_mark["unread_bytes"] == next(folder.path(2).glob("*.distcp")).stat().st_size
    assert whole["problems"] == []
    assert (cut_file["unread_bytes"], cut_file["keys"]) == (100, [])
    assert "the file has 100 bytes, but the metadata say " in cut_file["problems"][0]
    assert run("du", str(folder.root)).output.count("cannot be read") == 3


def test_hard_links_and_what_rules_would_free(folder: RunFolder, tmp_path: Path) -> None:
    """A file that a step which stays names, too, or that somebody else names, is not freed."""
    linked = folder.path(4)
    linked.mkdir()
    for file in folder.path(3).iterdir():
        os.link(file, linked / file.name)
    (data,) = folder.path(1).glob("*.distcp")
    os.link(data, tmp_path / "backup")
    told = as_json("du", str(folder.root), "--keep-latest", "1")
    check_sums(told)
    of_one = {path.name: 512 * path.stat().st_blocks for path in linked.iterdir()}
    assert told["shared_bytes"] == sum(of_one.values())
    assert told["allocated_bytes"] == 3 * sum(of_one.values())
    assert [each["linked_bytes"] for each in told["checkpoints"]] == [
        of_one[data.name],
        0,
        sum(of_one.values()),
        sum(of_one.values()),
    ]
    freed = told["would_free"]
    assert freed["removed"] == [str(folder.path(step)) for step in (1, 2, 3)]
    assert freed["bytes"] == sum(bytes_of(folder.path(step)) for step in (1, 2, 3))
    assert freed["allocated_bytes"] == 2 * sum(of_one.values()) - of_one[data.name]
    both = freed_by(Retention(folder.root, keep_latest=1), disk_usage(folder.root))
    assert both.allocated_bytes == freed["allocated_bytes"]
    assert len(folder.steps()) == 4
    assert "a prune would remove 3 steps with " in run("du", str(folder.root), "--keep-latest", "1").output
    assert run("du", str(folder.root), "--keep-every", "2").exit_code == 2
    assert run("du", str(folder.path(1)), "--keep-latest", "2").exit_code == 2


def test_holes_take_no_room(template: Path) -> None:
    with (template / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (told,) = as_json("du", str(template))["checkpoints"]
    assert told["other_bytes"] == 1 << 30
    assert told["allocated_bytes"] < 1 << 21


def test_parts_of_a_step(tmp_path: Path) -> None:
    model = nn.Linear(30, 20)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "extra_state": {"step": 1}}
    bytecheckpoint.save(tmp_path, state, "ddp", global_steps=7)
    told = as_json("du", str(tmp_path))
    check_sums(told)
    assert keys_of(told)["model", "float32"] == 4 * 620
    assert {key for key, _ in keys_of(told)} == {"model", "optimizer", "extra_state"}
    of_step = as_json("du", str(tmp_path / "global_step_7"), "--depth", "2")
    assert keys_of(of_step)["model.weight", "float32"] == 2400


def test_ranks_that_saved_by_themselves(tmp_path: Path) -> None:
    value = {"w": torch.ones(1000)}
    dcp.save(value, storage_writer=BcpWriter(tmp_path / "one"), use_collectives=False, no_dist=True)
    assert (tmp_path / "one" / "__0.metadata").exists()
    told = as_json("du", str(tmp_path / "one"))
    check_sums(told)
    assert keys_of(told) == {("w", "float32"): 4000}
    assert told["findings"] == 0


@pytest.mark.parametrize("name", sorted(path.name for path in STOCK.iterdir() if (path / ".metadata").exists()))
def test_stock_dcp(name: str) -> None:
    """Of another writer the metadata do not say how long files are; what is not elements is around them."""
    result = run("du", stock(name), "--json")
    listed = run("ls", stock(name), "--json")
    assert result.exit_code == (0 if listed.exit_code == 0 else 1), result.output
    if listed.exit_code == 0:
        check_sums(as_json("du", stock(name)))


def test_safetensors(tmp_path: Path) -> None:
    save_file(
        {"model.embed": torch.ones(30, 4), "lm_head": torch.ones(5, dtype=torch.float16)}, tmp_path / "a.safetensors"
    )
    (tmp_path / "config.json").write_bytes(b"{}")
    for path in (tmp_path, tmp_path / "a.safetensors"):
        told = as_json("du", str(path))
        check_sums(told)
        assert keys_of(told) == {("lm_head", "float16"): 10, ("model", "float32"): 480}
        assert told["checkpoints"][0]["formats"] == ["safetensors"]
    assert as_json("du", str(tmp_path))["checkpoints"][0]["other_bytes"] == 2
    # As a trainer of Hugging Face leaves them.
    shutil.copytree(tmp_path, tmp_path / "run" / "checkpoint-5", ignore=shutil.ignore_patterns("run"))
    told = as_json("du", str(tmp_path / "run"))
    check_sums(told)
    assert keys_of(told)["model", "float32"] == 480


def test_links_of_hugging_faces_cache(tmp_path: Path) -> None:
    """The blobs that the links of a snapshot lead to count."""
    blob, snapshot = tmp_path / "blobs" / ("a" * 64), tmp_path / "snapshots" / "r1"
    blob.parent.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(1000)}, blob)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    (told,) = as_json("du", str(snapshot))["checkpoints"]
    assert {row["key"]: row["bytes"] for row in told["keys"]} == {"w": 4000}
    link = (snapshot / "model.safetensors").lstat().st_size
    assert (told["bytes"], told["other_bytes"]) == (blob.stat().st_size + link, link)


def test_torch_files(tmp_path: Path) -> None:
    weight = torch.ones(100, 10)
    torch.save({"a.w": weight, "b.tied": weight}, tmp_path / "model.pt")
    told = as_json("du", str(tmp_path / "model.pt"))
    check_sums(told)
    assert keys_of(told) == {("a", "float32"): 4000, ("b", "float32"): 0}


def test_the_journal_of_a_checkpoint_is_overhead_of_it(tmp_path: Path) -> None:
    for part in ("model", "."):
        save(tmp_path / "step_1" / part, state(), config=Config(trace="full"))
        told = as_json("du", str(tmp_path / "step_1"))
        check_sums(told)
        (each,) = told["checkpoints"]
        folders = (tmp_path / "step_1").rglob(".bcp")
        assert each["overhead"]["records"] == sum(map(bytes_of, folders)) > 0
        assert (each["other_bytes"], each["unreferenced"], told["findings"]) == (0, [], 0)
    assert f"journal {each['overhead']['records']:,}" in run("du", str(tmp_path / "step_1")).output


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        result = run("du", str(path))
        assert result.exit_code == 2
        assert "no checkpoint there" in result.stderr
    (tmp_path / "notes.txt").write_bytes(b"nothing of a checkpoint")
    assert run("du", str(tmp_path)).exit_code == 2

# SPDX-License-Identifier: Apache-2.0
"""What ``verify`` calls whole with all bytes compared, and what a conversion takes, is what was saved, by anybody."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.goldens import GOLDEN
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import BcpReader, Config
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError

SOURCES = {
    "verl": GOLDEN / "verl-0.9.1-torch2.13.0" / "tp",
    "torch_checkpointing": GOLDEN / "torch_checkpointing-0.1.1" / "mesh" / "checkpoint",
    "zero2": GOLDEN / "deepspeed-0.19.8" / "zero2-fp32" / "run" / "global_step3",
    "zero3": GOLDEN / "deepspeed-0.19.8" / "zero3-bf16" / "run" / "global_step3",
    "universal": GOLDEN / "deepspeed-0.19.8" / "zero3-fp32" / "run" / "global_step3_universal",
    "Megatron-Core": GOLDEN / "megatron-0.19.2" / "state" / "checkpoint",
    "Megatron-Core, objects with tensors": GOLDEN / "megatron-0.19.2" / "gpt" / "checkpoint",
    "Orbax": GOLDEN / "orbax-0.12.8" / "zarr3" / "checkpoint",
}
FLIPS = 8  # of each file


def values(path: Path) -> dict[str, Any]:
    """Returns all that can be read."""
    stored = bytecheckpoint.read(path)
    found = {}
    for name in stored:
        with suppress(CheckpointError):  # objects of classes that are not there
            found[name] = stored[name]
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return repr(a) == repr(b)


def damaged(path: Path, flips: int) -> Iterator[tuple[Path, int]]:
    """Flips a bit of each file at several places, one at a time, and yields where."""
    for file in sorted(path.rglob("*")):
        content = file.read_bytes() if file.is_file() else b""
        for flip in range(flips if content else 0):
            at = (2 * flip + 1) * len(content) // (2 * flips)
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            yield file, at
            file.write_bytes(content)


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_whole_is_what_was_saved(name: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(SOURCES[name], path)
    whole = values(path)
    found, counted = 0, 0
    files = set()
    for file, at in damaged(path, FLIPS):
        files.add(file)
        try:
            report = bytecheckpoint.verify(path)
        except CheckpointError:
            found += 1
            continue
        if report.problems:
            found += 1
        elif report.bytes_unchecked:
            counted += 1
        else:
            again = values(path)
            assert whole.keys() == again.keys(), (file, at)
            assert all(same(value, again[key]) for key, value in whole.items()), (file, at)
    assert found + counted > len(files)


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "Orbax"])  # which has no checksums
def test_what_is_converted_is_what_was_saved(name: str, tmp_path: Path) -> None:
    """Each tensor goes into a piece of its own, so that what has one checksum may be read by many."""
    path = tmp_path / "checkpoint"
    shutil.copytree(SOURCES[name], path)
    whole = values(path)
    num_refused = 0
    for file, at in damaged(path, 3):
        target = tmp_path / "converted"
        try:
            convert(path, target, to="bcp", shard_size=64)
        except CheckpointError:
            num_refused += 1
            shutil.rmtree(tmp_path / ".converted.converting", ignore_errors=True)
            continue
        again = values(target)
        assert whole.keys() == again.keys(), (file, at)
        assert all(same(whole[key], value) for key, value in again.items()), (file, at)
        assert not [*target.glob("*.checksums")]
        shutil.rmtree(target)
    assert num_refused > 3


@pytest.mark.parametrize("at_byte", [1, 4000])
def test_what_was_converted_before_an_interruption_counts(at_byte: int, tmp_path: Path) -> None:
    """The first run may have read the damage, and the second one the rest of what has the checksum."""
    path = tmp_path / "checkpoint"
    shutil.copytree(SOURCES["zero3"], path)
    weights = bytecheckpoint.read(path)
    first = next(name for name in weights if name.startswith("module.") and weights[name].dtype == torch.float32)
    file = next(path.glob("*zero_pp_rank_0*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[content.index(bytes(weights[first].reshape(-1)[:2].view(torch.uint8)))] ^= 1
    file.write_bytes(content)

    def interrupt(done: int, total: int) -> None:
        if done >= at_byte:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "converted", to="bcp", shard_size=64, progress=interrupt)
    with pytest.raises(CorruptCheckpointError, match="the data have CRC"):
        convert(path, tmp_path / "converted", to="bcp", shard_size=64, resume=True)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("to", ["bcp", "dcp", "torch"])
def test_a_flipped_byte_in_an_object_of_stock_dcp(tmp_path: Path, to: Any) -> None:
    marks = torch.arange(1000)
    dcp.save({"w": torch.ones(3), "rng": (marks, "text")}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    (file,) = (tmp_path / "checkpoint").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(marks.numpy().tobytes()) + 4000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"'rng'.*CRC"):
        convert(tmp_path / "checkpoint", tmp_path / "converted", to=to)
    assert not (tmp_path / "converted").exists()
    with pytest.raises(CorruptCheckpointError, match=r"'rng'.*CRC"):
        bytecheckpoint.read(tmp_path / "checkpoint")["rng"]
    for planner in (None, dcp.DefaultLoadPlanner()):  # torch.load compares no checksum
        reader = BcpReader(tmp_path / "checkpoint", config=Config(planning="as given"))
        with pytest.raises((CheckpointException, CorruptCheckpointError), match=r"'rng'.*CRC"):
            dcp.load({"rng": None}, storage_reader=reader, planner=planner, no_dist=True)


@pytest.mark.parametrize("to", ["bcp", "dcp"])
def test_a_damaged_directory_of_an_object_of_stock_dcp(tmp_path: Path, to: Any) -> None:
    """It has no checksum, so whatever byte is damaged, what is copied is what was saved, or the conversion fails."""
    value = (torch.arange(10), "text")
    dcp.save({"rng": value}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    (file,) = (tmp_path / "checkpoint").glob("*.distcp")
    content = file.read_bytes()
    num_refused = 0
    for at in range(content.index(b"PK\1\2"), len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        try:
            convert(tmp_path / "checkpoint", tmp_path / f"{at}", to=to)
        except CorruptCheckpointError:
            num_refused += 1
            continue
        assert same(bytecheckpoint.read(tmp_path / f"{at}")["rng"], value), at
    assert num_refused > 100

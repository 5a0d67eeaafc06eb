# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp verify``, and what the engine reports beyond checksums: files that nobody refers to, saves under way."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import HOSTILE, as_json, run, save, stock

from bytecheckpoint import Config, save_state_dict, verify
from bytecheckpoint.errors import CorruptCheckpointError

ORPHAN = "__7_0.0123456789abcdef.distcp"
TMP = f".metadata.{'ab' * 16}.tmp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.distcp")
    return file


def tree(path: Path) -> list[tuple[Any, ...]]:
    """Returns all facts about a folder that a write would change."""
    facts = [(".", path.stat().st_mtime_ns)]
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        status = file.stat()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        facts.append((file.name, digest, status.st_mtime_ns, status.st_ino, status.st_mode))  # type: ignore[arg-type]
    return facts


def test_whole(path: Path) -> None:
    result = run("verify", str(path))
    assert result.exit_code == 0
    assert result.output.startswith(f"{path}: whole; 5 records in 1 file, ")
    report = as_json("verify", str(path))
    assert report["is_whole"] is True
    assert report["findings"] == 0
    assert report["bytes_checked"] == data_file(path).stat().st_size


def test_damage(path: Path) -> None:
    file = data_file(path)
    flip(file, 5000)
    result = run("verify", str(path))
    assert result.exit_code == 1
    finding, summary = result.output.splitlines()
    assert finding.startswith(f"{file.name}: records at 0 (")
    assert re.search(r"block has CRC [0-9a-f]{8}, but stored is [0-9a-f]{8}", finding)
    assert r"a\n\x1b[31m\u202eb\u05d0\\n\x9b'" in finding
    assert "1 problem;" in summary
    (problem,) = as_json("verify", str(path), code=1)["problems"]
    assert HOSTILE in problem["fqns"]
    with pytest.raises(CorruptCheckpointError, match=r"block has CRC .*; `bcp verify` lists all") as caught:
        verify(path).raise_if_damaged()
    assert "\n" not in str(caught.value)


def test_metadata(path: Path) -> None:
    flip(path / ".metadata", 10)
    result = run("verify", str(path))
    assert result.exit_code == 1
    assert result.output.startswith(".metadata: metadata at ")


def test_files_that_nobody_refers_to(path: Path) -> None:
    shutil.copy(data_file(path), path / ORPHAN)
    (path / "__0_0.distcp").write_bytes(b"left by stock DCP")
    (path / "notes.txt").write_text("ours to keep")
    (path / "link.distcp").symlink_to(path / "notes.txt")
    report = verify(path)
    assert report.unreferenced == ["__0_0.distcp", ORPHAN]
    assert report.notes == []
    assert report.is_whole
    report.raise_if_damaged()
    result = run("verify", str(path))
    assert result.exit_code == 1
    assert f"{ORPHAN}: the checkpoint does not refer to this file\n" in result.output
    assert f"{path}: 2 files too many; " in result.output
    assert as_json("verify", str(path), code=1)["findings"] == 2


@pytest.mark.parametrize("is_held", [True, False])
def test_a_save_that_may_be_under_way(path: Path, is_held: bool) -> None:
    """The files of the save are not findings. verify does not take its lock, so a save can take it meanwhile."""
    shutil.copy(data_file(path), path / ORPHAN)
    with (path / TMP).open("wb") as tmp:
        if is_held:
            fcntl.flock(tmp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before = tree(path)
        report = verify(path)
        if not is_held:
            fcntl.flock(tmp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert tree(path) == before
    assert report.unreferenced == []
    of_tmp, of_file = report.notes
    assert of_tmp.startswith(TMP + ": a save is under way" + ("" if is_held else " elsewhere, or has died"))
    assert of_file.startswith(ORPHAN)
    result = run("verify", str(path))
    assert result.exit_code == 0
    assert f"note: {TMP}: a save is under way" in result.output


def test_a_save_that_removes_older_files(path: Path) -> None:
    shutil.copy(data_file(path), path / ORPHAN)
    with (path / ".metadata").open("rb") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        report = verify(path)
    assert report.unreferenced == []
    assert report.notes[0].startswith(".metadata: was committed just now")


def test_parts_of_ranks(path: Path) -> None:
    (path / ".metadata").rename(path / "__0.metadata")
    assert verify(path).unreferenced == []
    shutil.copy(data_file(path), path / ORPHAN)
    assert verify(path).unreferenced == [ORPHAN]
    assert run("verify", str(path)).exit_code == 1


def test_it_writes_nothing(path: Path) -> None:
    shutil.copy(data_file(path), path / ORPHAN)
    (path / TMP).touch()
    path.chmod(0o555)
    for file in filter(Path.is_file, path.iterdir()):
        file.chmod(0o444)
    before = tree(path)
    try:
        assert run("verify", str(path)).exit_code == 0
        after = tree(path)
    finally:
        path.chmod(0o755)
    assert after == before


def large(path: Path) -> Path:
    """Saves one file of many segments. Its tensors begin and end anywhere, also in blocks of other tensors."""
    generator = torch.Generator().manual_seed(5)
    value = {
        f"t{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for number, size in enumerate([1, 300_000, 9_000_000, 17_000_001, 5, 262_144, 1_048_576, 100])
    }
    save(path, value)
    return path


@pytest.fixture(scope="module")
def of_segments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large(tmp_path_factory.mktemp("large") / "ckpt")


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("ring_bytes", [16 << 20, 136 << 20])
def test_any_number_of_threads(of_segments: Path, threads: int, ring_bytes: int) -> None:
    seen: list[tuple[int, int]] = []
    config = Config(io_threads=threads, ring_bytes=ring_bytes)
    report = verify(of_segments, config=config, progress=lambda done, total: seen.append((done, total)))
    assert report.problems == []
    assert report.num_records == 8
    size = data_file(of_segments).stat().st_size
    assert report.bytes_checked == size
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


@pytest.mark.parametrize("threads", [1, 4])
def test_every_damaged_block_is_told_once_and_in_order(of_segments: Path, tmp_path: Path, threads: int) -> None:
    path = Path(shutil.copytree(of_segments, tmp_path / "ckpt"))
    file = data_file(path)
    content = bytearray(file.read_bytes())
    blocks = range(1 << 18, 27 << 20, 9 << 18)
    for block in blocks:
        content[block + 77] ^= 8
    file.write_bytes(content)
    report = verify(path, config=Config(io_threads=threads, ring_bytes=64 << 20))
    assert [problem.offset for problem in report.problems] == list(blocks)


def test_interrupting_it(of_segments: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            verify(of_segments, progress=interrupt)
    assert verify(of_segments).is_whole


def test_a_checkpoint_of_stock_dcp() -> None:
    result = run("verify", stock("2.13.0-plain"))
    assert result.exit_code == 0
    assert ": whole; " in result.output
    assert "have none" in result.output


def test_a_checkpoint_without_anything_is_whole(tmp_path: Path) -> None:
    """There is no byte without a checksum in it, either."""
    save_state_dict(tmp_path / "ckpt", {}, no_dist=True)
    said = run("verify", str(tmp_path / "ckpt"))
    assert (said.exit_code, said.stderr) == (0, "")

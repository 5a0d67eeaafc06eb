# SPDX-License-Identifier: Apache-2.0
"""A load finds damaged, cut, swapped and too new files, and raises the right error on all ranks."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import failures, run_ranks

from bytecheckpoint import BcpReader, BcpWriter, Config
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, FormatVersionError
from bytecheckpoint.native import _core

# Sizes and offsets of the trailer of .metadata, as in csrc/format/FORMAT.md.
TRAILER_BYTES = 128
CRC_AT = 56
VERSION_AT = 112


def state() -> dict[str, Any]:
    return {"a": torch.arange(5000), "b": {str(rank): torch.arange(100) + rank for rank in range(2)}, "n": [1, "x"]}


def save(path: str) -> None:
    dcp.save(state(), storage_writer=BcpWriter(path))


def load_all(directories: list[str]) -> list[dict[int, BaseException]]:
    found = []
    for path in directories:
        got = {
            "a": torch.zeros(5000, dtype=torch.int64),
            "b": {k: torch.zeros_like(v) for k, v in state()["b"].items()},
        }
        found.append(failures(partial(dcp.load, {**got, "n": [0, ""]}, storage_reader=BcpReader(path))))
        dist.barrier()
    return found


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def patch_version(path: Path) -> None:
    """Raises the version in the trailer of .metadata, and corrects the trailer's own CRC."""
    raw = path.read_bytes()
    trailer = bytearray(raw[-TRAILER_BYTES:])
    assert struct.unpack_from("<I", trailer, VERSION_AT) == (_core.build_info()["format_version"],)
    (stored,) = struct.unpack_from("<I", trailer, CRC_AT)
    struct.pack_into("<I", trailer, CRC_AT, 0)
    assert zlib.crc32(trailer) == stored
    trailer[VERSION_AT] += 1
    struct.pack_into("<I", trailer, CRC_AT, zlib.crc32(trailer))
    path.write_bytes(raw[:-TRAILER_BYTES] + trailer)


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"))


def largest(path: Path) -> Path:
    return max(data_files(path), key=lambda file: file.stat().st_size)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def swap(path: Path) -> None:
    first, second = data_files(path)[:2]
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)


DAMAGES: dict[str, tuple[Callable[[Path], Any], type[CheckpointError]]] = {
    "pickle part of .metadata": (lambda p: flip(p / ".metadata", 40), CorruptCheckpointError),
    "manifest": (lambda p: flip(p / ".metadata", -TRAILER_BYTES - 60), CorruptCheckpointError),
    "trailer of .metadata": (lambda p: flip(p / ".metadata", -20), CorruptCheckpointError),
    "cut .metadata": (lambda p: cut(p / ".metadata", 1), CorruptCheckpointError),
    ".metadata without its trailer": (lambda p: cut(p / ".metadata", TRAILER_BYTES), CorruptCheckpointError),
    "empty .metadata": (lambda p: (p / ".metadata").write_bytes(b""), CorruptCheckpointError),
    "newer version": (lambda p: patch_version(p / ".metadata"), FormatVersionError),
    "data byte": (lambda p: flip(largest(p), 20000), CorruptCheckpointError),
    "last byte of a data file": (lambda p: flip(largest(p), -1), CorruptCheckpointError),
    "cut data file": (lambda p: cut(largest(p), 1), CorruptCheckpointError),
    "longer data file": (lambda p: largest(p).write_bytes(largest(p).read_bytes() + b"\0"), CorruptCheckpointError),
    "swapped data files": (swap, CorruptCheckpointError),
    "missing data file": (lambda p: largest(p).unlink(), CorruptCheckpointError),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[int, BaseException]]]:
    """Returns what each of two ranks raises, by the kind of damage."""
    root = tmp_path_factory.mktemp("damage")
    run_ranks(2, save, str(root / "whole"))
    directories = []
    for number, (damage, _) in enumerate(DAMAGES.values()):
        directory = root / str(number)
        shutil.copytree(root / "whole", directory)
        damage(directory)
        directories.append(str(directory))
    of_ranks = run_ranks(2, load_all, directories)
    return {name: [found[number] for found in of_ranks] for number, name in enumerate(DAMAGES)}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_seen_on_all_ranks(outcomes: dict[str, list[dict[int, BaseException]]], name: str) -> None:
    first, second = outcomes[name]
    assert {r: (type(e), str(e)) for r, e in first.items()} == {r: (type(e), str(e)) for r, e in second.items()}
    assert first
    for error in first.values():
        assert type(error) is DAMAGES[name][1], repr(error)
        assert isinstance(error, CheckpointError)
        assert error.path or "/" in str(error), "which file?"


def test_a_damaged_block_reaches_no_tensor(tmp_path: Path) -> None:
    wanted = torch.arange(200_000)  # 1.5 MiB: several blocks
    dcp.save({"a": wanted}, storage_writer=BcpWriter(tmp_path))
    flip(largest(tmp_path), 1_000_000)
    got = torch.full_like(wanted, -1)
    found = failures(lambda: dcp.load({"a": got}, storage_reader=BcpReader(tmp_path)))
    assert isinstance(found[0], CorruptCheckpointError)
    assert bool(((got == -1) | (got == wanted)).all())
    # Without verification the damaged block is loaded as it is.
    dcp.load({"a": got}, storage_reader=BcpReader(tmp_path, config=Config(verify=False)))
    assert int((got != wanted).sum()) == 1

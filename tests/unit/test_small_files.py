# SPDX-License-Identifier: Apache-2.0
"""Tests small files: the package touches only regular files with names of its own, and waits for nothing."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bytecheckpoint.errors import StorageError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.small_files import made_folder, read_small_file, refuse_irregular, replacing
from bytecheckpoint.training_state.tracker import TRACKER

TMP = ".name.tmp"
LIMIT_S = 120


def write(path: Path, content: bytes = b"new") -> None:
    with replacing(_core.Directory(str(path.parent)), path.name, TMP) as file:
        file.write(content)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def make_link(path: Path) -> None:
    target = path.with_name("theirs")
    target.write_bytes(b"theirs")
    path.symlink_to(target)


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a symbolic link": make_link,
    "a socket": make_socket,
}


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "name"
    assert read_small_file(path, 10) is None
    assert refuse_irregular(_core.Directory(str(tmp_path)), "name") is False
    (tmp_path / TMP).write_bytes(b"what a killed process left")
    write(path, b"old")
    write(path)
    assert read_small_file(path, 3) == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["name"]
    umask = os.umask(0o022)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_raises_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "name"
    write(path, b"old")

    def fail() -> None:
        with replacing(_core.Directory(str(tmp_path)), path.name, TMP) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    with pytest.raises(StorageError, match="No such file") as told:
        write(tmp_path / "none" / "name")
    assert (told.value.errno, told.value.path) == (errno.ENOENT, str(tmp_path / "none"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["name"]


def test_folders_are_made(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for path in (tmp_path / "link" / "a" / "b", tmp_path / "none" / ".." / "link" / "a" / "b"):
        assert made_folder(path).id == _core.Directory(str(tmp_path / "there" / "a" / "b")).id
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(StorageError, match=r"file.*Not a directory"):
            made_folder(path)


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", ["name", TMP])
def test_other_things_are_left_alone(tmp_path: Path, kind: str, name: str) -> None:
    IRREGULAR[kind](tmp_path / name)
    before = {entry.name: entry.lstat() for entry in tmp_path.iterdir()}
    with pytest.raises(StorageError, match=f"write.*{name}.*must be a regular file, but it is {kind}") as told:
        write(tmp_path / "name")
    assert told.value.errno
    if name == "name":
        with pytest.raises(StorageError, match=f"read.*must be a regular file, but it is {kind}"):
            read_small_file(tmp_path / "name", 10)
    assert {entry.name: entry.lstat() for entry in tmp_path.iterdir()} == before
    if kind == "a symbolic link":
        assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(StorageError, match="more than 10 bytes"):
        read_small_file(path, 10)


@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link"])
@pytest.mark.parametrize("name", [TRACKER, f".{TRACKER}.tmp"])
def test_a_tracker_in_whose_place_something_else_is(tmp_path: Path, kind: str, name: str) -> None:
    """Neither a save nor a search for the newest step hangs, and a link still leads where it did."""
    IRREGULAR[kind](tmp_path / name)
    script = f"""
import torch
from bytecheckpoint import find_latest_ckpt_path, latest, save
for call in (
    lambda: save({str(tmp_path)!r}, {{"model": torch.nn.Linear(3, 2)}}, "ddp", global_steps=7),
    lambda: find_latest_ckpt_path({str(tmp_path)!r}),
    lambda: latest({str(tmp_path)!r}),
):
    try:
        print(call())
    except Exception as error:
        print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    saved, found, newest = ran.stdout.splitlines()
    step = str(tmp_path / "global_step_7")
    assert saved == (
        f"StorageError write({tmp_path / name}): must be a regular file, but it is {kind}: {step} is committed, all "
        "parts, and loads; the tracker names no step"
    )
    assert (found, newest) == (step, step)
    if name == TRACKER:
        assert "find_latest_ckpt_path" in ran.stderr
        assert "the tracker cannot be read, so the time of the commit decides" in ran.stderr
    if kind == "a symbolic link":
        assert (tmp_path / "theirs").read_bytes() == b"theirs"
        assert (tmp_path / name).is_symlink()


@pytest.mark.parametrize(
    ("code", "num_times", "reads"), [(errno.ENOENT, 2, True), (errno.ESTALE, 2, True), (errno.ESTALE, 5, False)]
)
def test_a_file_that_is_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, num_times: int, reads: bool
) -> None:
    """Some file systems show none for a moment, or forget one that is open."""
    path = tmp_path / "small"
    path.write_bytes(b"new")
    status, failed = os.fstat, []

    def failing(descriptor: int) -> os.stat_result:
        if len(failed) < num_times:
            failed.append(descriptor)
            raise OSError(code, os.strerror(code))
        return status(descriptor)

    monkeypatch.setattr(os, "fstat", failing)
    if reads:
        assert read_small_file(path, 100) == b"new"
    else:
        with pytest.raises(StorageError, match=r"read\(.*small\): Stale"):
            read_small_file(path, 100)

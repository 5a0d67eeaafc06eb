# SPDX-License-Identifier: Apache-2.0
"""``copy_checkpoint`` and ``bcp copy``: what is copied, what is refused, and what happens meanwhile."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json, run
from support.equality import assert_equal
from torch import nn

import bytecheckpoint
from bytecheckpoint import Config, copy_checkpoint, load_state_dict, read, save_state_dict, verify
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnsupportedError,
)


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((3 << 20,), value), "o": {"a": [1, "b"]}, "empty": torch.zeros(0, 3)}


def saved(path: Path, value: float = 1.0) -> Path:
    save_state_dict(path, state(value), no_dist=True, user_metadata={"value": value})
    return path


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_files_and_metadata_are_the_same_bytes(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    told: list[tuple[int, int]] = []
    report = copy_checkpoint(source, tmp_path / "deep/er/target", progress=lambda *now: told.append(now))
    assert content(tmp_path / "deep/er/target") == content(source)
    assert told[-1] == (report.num_bytes, report.num_bytes)
    assert report.num_bytes == sum(file.stat().st_size for file in source.glob("*.distcp"))
    assert (report.is_new, report.num_files, report.warnings) == (True, 1, ())
    stored = read(tmp_path / "deep/er/target")
    assert stored.user_metadata == {"value": 1.0}
    before = dict(read(source))
    shutil.rmtree(source)
    assert_equal(dict(stored), before)
    got = {"w": torch.zeros(3 << 20)}
    dcp.load(got, checkpoint_id=tmp_path / "deep/er/target", no_dist=True)  # stock DCP
    assert_equal(got["w"], state()["w"])


def test_a_step_in_parts(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    live = {"model": model, "optimizer": optimizer, "extra_state": {"step": 3}}
    bytecheckpoint.save(tmp_path / "run", live, "ddp", global_steps=3)
    report = copy_checkpoint(tmp_path / "run/global_step_3", tmp_path / "other/global_step_3")
    assert len(report.save_ids) == 3
    other = nn.Linear(3, 4)
    loaded = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "extra_state": {"step": 0}}
    bytecheckpoint.load(tmp_path / "other/global_step_3", loaded, "ddp")
    assert_equal(other.state_dict(), model.state_dict())
    assert loaded["extra_state"] == {"step": 3}
    assert not copy_checkpoint(tmp_path / "run/global_step_3", tmp_path / "other/global_step_3").is_new


def test_to_a_url_and_back(tmp_path: Path) -> None:
    """Of the store only the URL of the target is known, and nothing is below it."""
    source = saved(tmp_path / "source")
    url = f"memory://copying/{tmp_path.name}/deep/target"
    assert copy_checkpoint(source, url).is_new
    assert not copy_checkpoint(source, url).is_new
    assert copy_checkpoint(url, tmp_path / "back").is_new
    assert content(tmp_path / "back") == content(source)
    with pytest.raises(CheckpointExistsError, match="overwrite=False"):
        copy_checkpoint(saved(tmp_path / "other", 2.0), url)


def test_damage_is_not_copied(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    (file,) = source.glob("*.distcp")
    for at in (0, 5 << 20, file.stat().st_size - 1):
        whole = file.read_bytes()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match=file.name):
            copy_checkpoint(source, tmp_path / "target")
        assert not (tmp_path / "target").exists()
        file.write_bytes(whole)
    file.write_bytes(whole[:-1000])
    with pytest.raises(CorruptCheckpointError, match=file.name):
        copy_checkpoint(source, tmp_path / "target")


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(tmp_path / "none", tmp_path / "target")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(UnsupportedError, match=r"another writer.*bcp convert --to bcp"):
        copy_checkpoint(tmp_path / "stock", tmp_path / "target")
    with pytest.raises(ConfigError, match="bytes_per_s=-1"):
        copy_checkpoint(saved(tmp_path / "source"), tmp_path / "target", bytes_per_s=-1)
    assert not (tmp_path / "target").exists()
    with pytest.raises(UnsupportedError, match="HTTP"):
        copy_checkpoint(tmp_path / "source", "http://127.0.0.1:9/run")


def test_a_copy_that_lacks_files_is_mended(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "source"), tmp_path / "target"
    copy_checkpoint(source, target)
    (file,) = target.glob("*.distcp")
    file.unlink()
    assert copy_checkpoint(source, target).is_new
    file.write_bytes(file.read_bytes()[:1000])
    assert copy_checkpoint(source, target).is_new
    assert content(target) == content(source)
    assert not copy_checkpoint(source, target).is_new


def test_what_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    """Who made it is not known, so it is another checkpoint."""
    source, target = saved(tmp_path / "source"), saved(tmp_path / "target", 2.0)
    mark = target / ".metadata"
    mark.write_bytes(b"damaged" + mark.read_bytes())
    before = content(target)
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(source, target)
    assert content(target) == before


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_folder_is_not_copied_onto_itself(tmp_path: Path, is_damaged: bool) -> None:
    """Files that were taken for those of a broken copy would be the only ones."""
    source = saved(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    if is_damaged:
        (file,) = source.glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-10])
    before = content(source)
    for target in (source, tmp_path / "link", f"{tmp_path}/./source/"):
        with pytest.raises(ConfigError, match="source and target are one folder"):
            copy_checkpoint(source, target, overwrite=True)
    assert content(source) == before


def live(path: Path, *parts: str) -> Path:
    model = nn.Linear(3, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "extra_state": {"step": 3}}
    bytecheckpoint.save(path, {part: state[part] for part in parts}, "ddp")
    return path


def test_checkpoints_of_two_kinds_do_not_mix(tmp_path: Path) -> None:
    """Neither hides the other, and a part of another save does not come beside those that are there."""
    plain, whole = saved(tmp_path / "plain"), live(tmp_path / "whole", "model", "optimizer", "extra_state")
    model = live(tmp_path / "model-only", "model")
    before = {
        path: content(path) for path in (plain, model / "model", *(whole / part for part in ("model", "optimizer")))
    }
    for overwrite in (False, True):
        for source, target in ((whole, plain), (plain, whole), (model, whole)):
            with pytest.raises(CheckpointExistsError, match="would stand beside the copy"):
                copy_checkpoint(source, target, overwrite=overwrite)
    with pytest.raises(CheckpointExistsError, match="already exists"):
        copy_checkpoint(whole, model)
    assert {path: content(path) for path in before} == before
    assert not (model / "optimizer").exists()
    copy_checkpoint(whole, model, overwrite=True)
    assert content(model / "optimizer") == content(whole / "optimizer")


def test_a_source_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    times = iter([lambda: saved(source, 2.0)])

    def replace(done: int, total: int) -> None:
        next(times, lambda: None)()

    try:
        report = copy_checkpoint(source, tmp_path / "target", progress=replace, bytes_per_s=8 << 20)
    except CheckpointChangedError as error:
        assert "a newer save replaced it" in str(error)  # noqa: PT017
        assert not (tmp_path / "target/.metadata").exists()
    else:  # the open file kept the bytes
        assert read(tmp_path / "target").user_metadata == {"value": 1.0}
        assert report.is_new
    assert copy_checkpoint(source, tmp_path / "target", overwrite=True).is_new
    assert read(tmp_path / "target").user_metadata == {"value": 2.0}


def test_two_copies_at_once(tmp_path: Path) -> None:
    """One copies, the other says that somebody is at it."""
    source = saved(tmp_path / "source")
    begun, go = threading.Event(), threading.Event()

    def wait(done: int, total: int) -> None:
        begun.set()
        go.wait(30)

    first = threading.Thread(target=copy_checkpoint, args=(source, tmp_path / "target"), kwargs={"progress": wait})
    first.start()
    assert begun.wait(30)
    with pytest.raises(CheckpointBusyError):
        copy_checkpoint(source, tmp_path / "target")
    go.set()
    first.join()
    assert not copy_checkpoint(source, tmp_path / "target").is_new
    verify(tmp_path / "target").raise_if_damaged()


def test_an_interrupted_copy_leaves_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(source, tmp_path / "target", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_rate_is_kept(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")  # 12.6 MB
    begin = time.monotonic()
    copy_checkpoint(source, tmp_path / "target", bytes_per_s=20_000_000)
    assert time.monotonic() - begin > 0.2


def test_ranks_that_committed_parts_of_their_own_are_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=bytecheckpoint.BcpWriter(tmp_path / "s"), no_dist=True)
    (tmp_path / "s/.metadata").rename(tmp_path / "s/__0.metadata")
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(tmp_path / "s", tmp_path / "target")


def test_command(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    told = as_json("copy", str(source), str(tmp_path / "target"), "--rate", "500")
    assert (told["is_new"], told["num_files"]) == (True, 1)
    assert run("copy", str(source), str(tmp_path / "target")).output == f"{tmp_path}/target: is there already\n"
    saved(source, 2.0)
    refused = run("copy", str(source), str(tmp_path / "target"))
    assert (refused.exit_code, "already exists" in refused.output) == (2, True)
    assert "all compared" in run("copy", str(source), str(tmp_path / "target"), "--overwrite").output
    got = {"w": torch.zeros(3 << 20)}
    load_state_dict(tmp_path / "target", got, no_dist=True, config=Config())
    assert_equal(got["w"], state(2.0)["w"])

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints load from a folder of a web server. It is Python's own, with the ranges that it lacks."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sharded_states
from support.equality import assert_equal
from support.ranks import run_ranks
from support.web_site import Site

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config, load_state_dict, save_state_dict, verify
from bytecheckpoint.checkpoint.disk_usage import disk_usage
from bytecheckpoint.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError, StorageError
from bytecheckpoint.storage.object_store.stores import use_store

pytest.importorskip(
    "obstore", reason="obstore is not installed: NO URL IS TESTED; pip install 'bytecheckpoint-dcp[cloud]'"
)

NUMEL = 3_000_000  # of float32: two reads
NOTE = "unreferenced files were not looked for: over HTTP a folder has no listing"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    started = Site(tmp_path)
    yield started
    started.close()


def state(*, filled: bool = True) -> dict[str, Any]:
    w = torch.arange(NUMEL, dtype=torch.float32) if filled else torch.zeros(NUMEL)
    return {"w": w, **sharded_states.state("plain", filled=filled)}


def loaded(url: str, config: Config | None = None) -> dict[str, Any]:
    found = state(filled=False)
    load_state_dict(url, found, config=config)
    return found


@pytest.mark.parametrize("tags", ["", "W/", None], ids=["strong tags", "weak tags", "no tags"])
@pytest.mark.parametrize("writer", [BcpWriter, dcp.FileSystemWriter])
def test_it_loads(site: Site, tmp_path: Path, writer: Any, tags: str | None) -> None:
    """With strong tags every read is of one version of a file. Without them a checkpoint loads, too."""
    dcp.save(state(), storage_writer=writer(tmp_path / "ckpt"), no_dist=True)
    site.tags = tags
    url = f"{site.url}/ckpt"
    assert_equal(loaded(url), state())
    report = verify(url)
    assert report.is_whole
    assert report.bytes_checked > 4 * NUMEL
    assert report.notes == [NOTE]
    assert {method for method, _ in site.requests} == {"HEAD", "GET"}


def save_over_ranks(path: Path) -> None:
    dcp.save(sharded_states.state("saved", filled=True), storage_writer=BcpWriter(path))


def load_over_ranks(url: str) -> None:
    for planner in (None, BcpLoadPlanner()):
        found = sharded_states.state("moved", filled=False)
        dcp.load(found, storage_reader=BcpReader(url), planner=planner)
        assert_equal(found, sharded_states.state("moved", filled=True))


def test_ranks_load(site: Site, tmp_path: Path) -> None:
    run_ranks(2, save_over_ranks, tmp_path)
    run_ranks(3, load_over_ranks, site.url)


@pytest.mark.parametrize("folder", ["my run+a=b~\u00e4", "my%20run+a=b~%C3%A4", "my%20run%2ba%3db~%c3%a4"])
def test_names_may_be_escaped_as_in_any_url(site: Site, tmp_path: Path, folder: str) -> None:
    save_state_dict(tmp_path / "my run+a=b~\u00e4", {"step": 3})
    found = {"step": 0}
    load_state_dict(f"{site.url}/{folder}/", found)
    assert found["step"] == 3


@pytest.mark.parametrize("writer", [BcpWriter, dcp.FileSystemWriter])
def test_what_it_takes_and_where_things_are(site: Site, tmp_path: Path, writer: Any) -> None:
    """Without a listing, what the metadata name counts."""
    dcp.save({"model": state(), "step": 3}, storage_writer=writer(tmp_path), no_dist=True)
    (told,) = disk_usage(site.url).to_dict()["checkpoints"]
    assert told["bytes"] == sum(file.stat().st_size for file in tmp_path.iterdir() if file.is_file())
    assert told["bytes"] == sum(row["bytes"] for row in told["keys"]) + told["overhead"]["bytes"]
    next(tmp_path.glob("*.distcp")).unlink()
    (told,) = disk_usage(site.url).to_dict()["checkpoints"]
    assert "there is no such file, but the metadata name it" in told["problems"][0]
    with pytest.raises(CheckpointNotFoundError):
        disk_usage(f"{site.url}/none")


def test_no_checkpoint(site: Site) -> None:
    for call in (verify, lambda url: load_state_dict(url, {"step": 0})):
        with pytest.raises(CheckpointNotFoundError, match=r"open\(http://.*/none/\.metadata\): no checkpoint there"):
            call(f"{site.url}/none")
    assert {method for method, _ in site.requests} <= {"GET", "HEAD"}  # no listing


def test_damage(site: Site, tmp_path: Path) -> None:
    save_state_dict(tmp_path, state())
    (path,) = tmp_path.glob("*.distcp")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=rf"http://.*/{re.escape(path.name)}"):
        loaded(site.url)
    assert [problem.file for problem in verify(site.url).problems] == [path.name]


@pytest.mark.parametrize("tags", ["", None], ids=["strong tags", "no tags"])
def test_a_checkpoint_that_is_replaced_during_the_load(site: Site, tmp_path: Path, tags: str | None) -> None:
    site.tags = tags
    save_state_dict(tmp_path, {"w": torch.ones(5), "step": 1})

    class Late(BcpLoadPlanner):
        def create_local_plan(self) -> Any:
            save_state_dict(tmp_path, {"w": torch.full((5,), 2.0), "step": 2}, no_dist=True)
            return super().create_local_plan()

    with pytest.raises(CheckpointChangedError, match="a newer commit replaced the checkpoint while it was read"):
        load_state_dict(site.url, {"w": torch.zeros(5), "step": 0}, planner=Late())
    assert verify(site.url).is_whole


def test_a_file_that_is_replaced_between_two_reads(site: Site, tmp_path: Path) -> None:
    """Stock DCP gives files of a later save the same names. Only a strong tag tells one from the other."""
    client = use_store(site.url, Config())
    for tags, is_seen in (("", True), ("W/", False), (None, False)):
        site.tags = tags
        (tmp_path / "file").write_bytes(b"old")
        num_bytes, version = client.open("file")
        (tmp_path / "file").write_bytes(b"new")
        os.utime(tmp_path / "file", ns=(0, 0))
        if is_seen:
            with pytest.raises(OSError, match="file") as caught:
                client.read("file", version, 0, num_bytes)
            assert caught.value.errno == errno.ESTALE
        else:
            assert bytes(client.read("file", version, 0, num_bytes)) == b"new"


def test_a_server_without_ranges(site: Site, tmp_path: Path) -> None:
    """So is ``python -m http.server``."""
    save_state_dict(tmp_path, {"step": 1})
    site.has_ranges = False
    with pytest.raises(StorageError, match=r"get\(http://.*/\.metadata, .*Range request not supported"):
        load_state_dict(site.url, {"step": 0})


def test_a_token(site: Site, tmp_path: Path) -> None:
    save_state_dict(tmp_path, state())
    site.token = "Bearer SECRET"
    with pytest.raises(StorageError, match="401") as caught:
        loaded(site.url)
    assert "SECRET" not in str(caught.value)
    options = {"client_options": {"default_headers": {"authorization": site.token}}}
    assert_equal(loaded(site.url, Config(storage_options=options)), state())

# SPDX-License-Identifier: Apache-2.0
"""Ranks that load one path, which leads each of them to another directory, are told so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.pretended_hosts import pretend_host
from support.ranks import failures, run_ranks

from bytecheckpoint import BcpReader, BcpWriter, load_state_dict, save_state_dict
from bytecheckpoint.dcp.repeated_loads import load_until_unchanged
from bytecheckpoint.errors import CheckpointChangedError, ConfigError

# One path on all ranks, which leads each of them into its own directory, as with a disk in each machine.
PATH = "/proc/self/cwd/ckpt"


def load_elsewhere(root: Path) -> list[str]:
    """Returns the texts of a load by our entry point, and of two by DCP's."""
    rank = dist.get_rank()
    pretend_host(f"node{rank}")
    (root / str(rank)).mkdir()
    os.chdir(root / str(rank))
    state = {"a": torch.zeros(3)}
    save_state_dict(PATH, state, no_dist=True)
    with pytest.raises(ConfigError) as caught:
        load_state_dict(PATH, state)
    reader = BcpReader(PATH)
    first, second = (failures(lambda: dcp.load(state, storage_reader=reader)) for _ in range(2))
    assert {type(error) for error in first.values()} == {CheckpointChangedError}
    assert {type(error) for error in second.values()} == {ConfigError}
    return [str(caught.value), str(first[0]), str(second[0])]


def test_a_load_names_the_hosts_that_find_other_saves(tmp_path: Path) -> None:
    for own, first, second in run_ranks(2, load_elsewhere, tmp_path):
        for text in (own, first, second):
            assert text.startswith(f"load({PATH}): the ranks find different saves there: save ")
            for rank in range(2):
                assert f" on rank {rank} on node{rank}" in text
        assert "the path is not shared between the ranks, or the file system shows some of them an old state" in own
        assert "a newer commit came in between, or the path is not shared" in first
        assert second == own


def load_beside_a_commit(root: Path) -> None:
    """Rank 1 sees the save before the one that rank 0 sees, once."""
    rank, state, once = dist.get_rank(), {"a": torch.zeros(3)}, root / "once"
    if rank == 0:
        for number in range(2):
            save_state_dict(root / str(number), {"a": torch.full((3,), float(number))}, no_dist=True)
    dist.barrier()

    class Late(BcpReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if rank == 1:
                self.path = root / ("1" if once.exists() else "0")
                once.touch()
            found = super().read_metadata(*args, **kwargs)
            self.path = root / "1"
            return found

    reader = Late(root / "1")
    load_until_unchanged(lambda: dcp.load(state, storage_reader=reader), reader)
    assert torch.equal(state["a"], torch.ones(3))


def test_a_rank_that_was_behind_once_reads_again(tmp_path: Path) -> None:
    run_ranks(2, load_beside_a_commit, tmp_path)


def test_a_writer_of_such_a_path_still_says_so(tmp_path: Path) -> None:
    run_ranks(2, save_elsewhere, tmp_path)


def save_elsewhere(root: Path) -> None:
    rank = dist.get_rank()
    (root / str(rank)).mkdir()
    os.chdir(root / str(rank))
    found = failures(lambda: dcp.save({f"of {rank}": torch.zeros(3)}, storage_writer=BcpWriter(PATH)))
    assert all("the path is not shared between the ranks" in str(error) for error in found.values())

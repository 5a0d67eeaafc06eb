# SPDX-License-Identifier: Apache-2.0
"""Tests that stock DCP and we can read the made-up metadata that benchmarks/metadata.py measures."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from bytecheckpoint import _testing
from bytecheckpoint.native import _core


@pytest.mark.parametrize(("kind", "num_tensors"), [("fsdp", 5), ("3d", 10)])
def test_every_rank_finds_its_chunks(tmp_path: Path, kind: str, num_tensors: int) -> None:
    made = _testing.SyntheticMetadata(kind, 160, 5)
    boxes = [made.boxes_of(rank) for rank in range(160)]
    assert made.lay_out() > 0
    made.assemble()
    made.forget_results()
    path = tmp_path / ".metadata"
    num_bytes = made.encode()
    made.write_to(str(path))
    assert path.stat().st_size == num_bytes

    for wanted in boxes:
        chunks, blocks_read, blocks = _testing.find_chunks(str(tmp_path), wanted)
        assert chunks == 5
        assert 0 < blocks_read <= blocks
    with path.open("rb") as file:
        metadata = pickle.load(file)
    assert len(metadata.state_dict_metadata) == num_tensors
    assert len(metadata.storage_data) == 160 * 5
    for fqn, offsets, sizes in boxes[7]:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        assert chunk in metadata.state_dict_metadata[fqn].chunks
    assert len(_core.Checkpoint.open(str(tmp_path)).files()) == 160


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="'4d'"):
        _testing.SyntheticMetadata("4d", 8, 1)
    with pytest.raises(ValueError, match="7 ranks"):
        _testing.SyntheticMetadata("3d", 7, 1)
    with pytest.raises(ValueError, match="at least one"):
        _testing.SyntheticMetadata("fsdp", 0, 1)

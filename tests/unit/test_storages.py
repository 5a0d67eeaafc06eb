# SPDX-License-Identifier: Apache-2.0
"""Tests tensors whose memory is not what their shape says, a default device, and metadata that users replace."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint import BcpReader, BcpWriter
from bytecheckpoint.errors import InvalidPlanError, SaveFailedError


@pytest.mark.parametrize("elements", [0, 999])
def test_a_freed_storage_is_refused(tmp_path: Path, elements: int) -> None:
    """FSDP frees storages. A save of a freed one must not replace a checkpoint."""
    dcp.save({"t": torch.ones(1000)}, storage_writer=BcpWriter(tmp_path))
    freed = torch.zeros(1000)
    freed.untyped_storage().resize_(4 * elements)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"t": freed}, storage_writer=BcpWriter(tmp_path))
    ((error, _),) = caught.value.failures.values()
    assert type(error) is SaveFailedError
    assert type(error.reasons[0]) is InvalidPlanError
    assert "'t'" in str(error)
    assert "freed" in str(error)
    got = {"t": torch.zeros(1000)}
    dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert torch.equal(got["t"], torch.ones(1000))


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    """Tensors of another dtype are loaded through host copies, which must not be made on another device."""
    dcp.save({"t": torch.arange(10.0)}, storage_writer=BcpWriter(tmp_path))
    got = {"t": torch.zeros(10, dtype=torch.float64)}
    with torch.device("meta"):
        dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert torch.equal(got["t"], torch.arange(10.0, dtype=torch.float64))


def test_an_opaque_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    class Other(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):  # type: ignore[no-untyped-def]
            return torch.quantize_per_tensor(torch.zeros(8), 0.5, 0, torch.qint8)

    state = {"t": torch.quantize_per_tensor(torch.zeros(4), 0.5, 0, torch.qint8)}
    with pytest.raises(CheckpointException, match=r"planned \[4\], got \[8\]"):
        dcp.save(state, storage_writer=BcpWriter(tmp_path), planner=Other())


def test_metadata_can_be_replaced_and_filled_from_outside(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(3)}, storage_writer=BcpWriter(tmp_path))
    reader = BcpReader(tmp_path)
    replaced = dataclasses.replace(reader.read_metadata(), planner_data={"x": ("y",)})
    assert type(replaced) is Metadata
    assert replaced.storage_data == reader.read_metadata().storage_data
    emptied = dataclasses.replace(reader.read_metadata(), storage_data=None)
    assert emptied.storage_data is None
    metadata = reader.read_metadata()
    metadata.storage_data = {"other": 1}
    assert metadata.storage_data == {"other": 1}
    assert list(metadata.state_dict_metadata) == ["t"]
    assert type(pickle.loads(pickle.dumps(metadata))) is Metadata

# SPDX-License-Identifier: Apache-2.0
"""``cast`` of a save on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import read, save_state_dict
from bytecheckpoint.errors import ConfigError


def cast_of_shards(folder: Path) -> None:
    """A DTensor is cast where it is, and each rank stores its shard of the copy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(7, 5) / 7
    value = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
    save_state_dict(folder, {**value, "copy": dict(value)}, cast={"copy": "bfloat16"})
    stored = read(folder)
    assert_equal(stored["w"], whole)
    assert_equal(stored["copy.w"], whole.bfloat16())


def test_a_copy_of_shards(tmp_path: Path) -> None:
    run_ranks(3, cast_of_shards, tmp_path)


def cast_on_one_rank(folder: Path) -> None:
    """A pattern may match tensors of one rank alone; one that matches none is an error on all."""
    own = {"a": torch.ones(2)} if dist.get_rank() == 0 else {"b": torch.ones(2)}
    save_state_dict(folder, own, cast={"b": "float64"})
    assert read(folder)["b"].dtype == torch.float64
    with pytest.raises(ConfigError, match="on any rank: 'c'"):
        save_state_dict(folder, own, cast={"b": "float64", "c": "float64"})


def test_a_pattern_of_one_rank(tmp_path: Path) -> None:
    run_ranks(2, cast_on_one_rank, tmp_path)

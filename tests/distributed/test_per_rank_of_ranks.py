# SPDX-License-Identifier: Apache-2.0
"""What other ranks get of the values that each rank saved as its own: by policy, from each number of ranks to each."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from bytecheckpoint import LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.errors import KeyMismatchError

POLICY = {"step": "replicated", "queue": "sharded", "ids": "sharded", "uneven": "sharded"}


def save(path: Path) -> None:
    rank = dist.get_rank()
    of_rank = {
        "rng": {"seed": rank, "state": torch.full((3,), rank)},
        "step": 7,
        "queue": [10 * rank, 10 * rank + 1],
        "ids": torch.tensor([rank, rank]),
        "uneven": tuple(range(rank)),
    }
    if rank == 1:
        of_rank["only_1"] = "x"
    save_state_dict(path, {f"w{rank}": torch.ones(10), "shared": 1}, per_rank=of_rank, per_rank_policy=POLICY)


def load(path: Path, with_own: bool) -> tuple[dict[str, Any] | str, list[str]]:
    into: dict[str, Any] = {"rng": "own", "only_1": "own"} if with_own else {}
    spec = LoadSpec(include="shared", strict="checkpoint" if with_own else True)  # one rank has saved no "only_1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load_state_dict(path, {"shared": 0}, per_rank=into, spec=spec)
        except KeyMismatchError as error:
            return str(error), []
    found = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in into.items()}
    return found, [str(each.message) for each in caught if "per_rank: " in str(each.message)]


@pytest.mark.parametrize("num_saved", [1, 2, 3])
@pytest.mark.parametrize("num_loaded", [1, 2, 3])
def test_from_each_number_to_each(tmp_path: Path, num_saved: int, num_loaded: int) -> None:
    run_ranks(num_saved, save, tmp_path / "ckpt")
    found, said = zip(*run_ranks(num_loaded, load, tmp_path / "ckpt", num_saved != num_loaded), strict=True)
    if num_saved != num_loaded:
        assert said[0] == ["bytecheckpoint: per_rank: 'only_1', 'rng' is not loaded: what is there is kept"]
    assert not any(said[1:])
    for rank, of_rank in enumerate(found):
        assert of_rank.pop("step") == 7
        if num_saved == num_loaded:
            rng = of_rank.pop("rng")
            assert rng["seed"] == rank
            assert rng["state"].tolist() == [rank] * 3
            assert of_rank.pop("only_1", None) == ("x" if rank == 1 else None)
        else:
            assert (of_rank.pop("rng"), of_rank.pop("only_1")) == ("own", "own")
        assert of_rank.keys() == {"queue", "ids", "uneven"}
    queue, ids, uneven = ([*chain(*(of_rank[key] for of_rank in found))] for key in ("queue", "ids", "uneven"))
    assert queue == [each for rank in range(num_saved) for each in (10 * rank, 10 * rank + 1)]
    assert ids == [rank for rank in range(num_saved) for _ in range(2)]
    assert uneven == [each for rank in range(num_saved) for each in range(rank)]


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path / "ckpt")
    for said, _ in run_ranks(3, load, tmp_path / "ckpt", False):
        assert "per_rank: 'only_1', 'rng' was saved by each of 2 ranks as its own, but 3 ranks load" in said
        assert "per_rank_policy={key: 'replicated' or 'sharded'}" in said


def save_by_policies(folder: Path, policies: tuple[str, str]) -> None:
    mine = {"sampler": [dist.get_rank()] * 3}
    save_state_dict(folder, {"w": torch.ones(2)}, per_rank=mine, per_rank_policy=policies[dist.get_rank()])


@pytest.mark.parametrize("policies", [("own", "sharded"), ("replicated", "own"), ("sharded", "replicated")])
def test_policies_that_differ_between_ranks(tmp_path: Path, policies: tuple[str, str]) -> None:
    """Whoever loads would get a part of the values, or another rank's; nothing is put into ``per_rank``."""
    run_ranks(2, save_by_policies, tmp_path, policies)
    mine: dict[str, Any] = {"sampler": [-1]}
    named = ", ".join(sorted(policies))
    with pytest.raises(KeyMismatchError, match=f"'sampler' by different policies: {named}"):
        load_state_dict(tmp_path, {"w": torch.zeros(2)}, per_rank=mine, no_dist=True)
    assert mine == {"sampler": [-1]}
    load_state_dict(tmp_path, {"w": torch.zeros(2)}, no_dist=True)

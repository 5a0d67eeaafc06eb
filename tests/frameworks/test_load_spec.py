# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.load`` with a LoadSpec: renamed, cast, stacked and partial models, on one rank and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import LoadSpec
from bytecheckpoint.errors import KeyMismatchError, ShapeMismatchError
from bytecheckpoint.transforms import Concat, Transpose


def trained() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.ModuleDict(
        {"q": torch.nn.Linear(6, 4), "k": torch.nn.Linear(6, 4), "out": torch.nn.Linear(4, 3, bias=False)}
    )


class Renamed(torch.nn.Module):
    """The same with other names; q and k are one layer, and ``out`` is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Linear(6, 8)
        self.proj = torch.nn.Parameter(torch.zeros(4, 3))


SPEC = LoadSpec(
    transforms=[
        Concat(["q.weight", "k.weight"], "qk.weight"),
        Concat(["q.bias", "k.bias"], "qk.bias"),
        Transpose("out.weight", "proj"),
    ]
)


def save(path: Path) -> dict[str, torch.Tensor]:
    model = trained()
    bytecheckpoint.save(path, {"model": model}, "ddp")
    return model.state_dict()


def assert_loaded(model: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    got = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }
    assert torch.equal(got["qk.weight"], torch.cat([wanted["q.weight"], wanted["k.weight"]]))
    assert torch.equal(got["qk.bias"], torch.cat([wanted["q.bias"], wanted["k.bias"]]))
    assert torch.equal(got["proj"], wanted["out.weight"].T)


def test_another_model_takes_it(tmp_path: Path) -> None:
    wanted, model = save(tmp_path), Renamed()
    result = bytecheckpoint.load(tmp_path, {"model": model}, "ddp", spec=SPEC)
    assert_loaded(model, wanted)
    assert not result.missing_keys
    assert not result.unexpected_keys


def load_sharded(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    model = fully_shard(Renamed())
    bytecheckpoint.load(path, {"model": model}, "fsdp2", spec=SPEC)
    assert_loaded(model, wanted)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_of_fsdp2_take_it(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(num_ranks, load_sharded, tmp_path, save(tmp_path))


def test_strict_and_cast_of_the_spec_count(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(KeyMismatchError, match=r"not asked for: model: k\.weight, model: k\.bias"):
        bytecheckpoint.load(
            tmp_path, {"model": torch.nn.ModuleDict({"q": torch.nn.Linear(6, 4)})}, "ddp", spec=LoadSpec()
        )
    part = torch.nn.ModuleDict({"q": torch.nn.Linear(6, 4)})
    result = bytecheckpoint.load(tmp_path, {"model": part}, "ddp", spec=LoadSpec(strict="model"))
    assert result.unexpected_keys == ("model: k.weight", "model: k.bias", "model: out.weight")
    result = bytecheckpoint.load(tmp_path, {"model": part}, "ddp", spec=LoadSpec(include="q"))
    assert not result.unexpected_keys
    more = torch.nn.ModuleDict({"q": torch.nn.Linear(6, 4), "new": torch.nn.Linear(1, 1)})
    with pytest.raises(KeyMismatchError, match=r"new\.bias"):
        bytecheckpoint.load(tmp_path, {"model": more}, "ddp", spec=LoadSpec(include="q"))
    result = bytecheckpoint.load(tmp_path, {"model": more}, "ddp", spec=LoadSpec(include="q", strict="checkpoint"))
    assert result.missing_keys == ("model: new.weight", "model: new.bias")
    for cast, dtype in (("widen", torch.float64), ("any", torch.float16), ({"q.*": "bfloat16"}, torch.bfloat16)):
        cast_model = part.to(dtype)
        bytecheckpoint.load(tmp_path, {"model": cast_model}, "ddp", spec=LoadSpec(include="q", cast=cast))
        with pytest.raises(ShapeMismatchError, match=r"'q\.weight' is"):
            bytecheckpoint.load(tmp_path, {"model": cast_model}, "ddp", spec=LoadSpec(include="q"))

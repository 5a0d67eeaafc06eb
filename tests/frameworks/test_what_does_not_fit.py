# SPDX-License-Identifier: Apache-2.0
"""Loads with other keys, shapes and dtypes than were saved, and calls with wrong arguments."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import run_ranks
from torch import nn

import bytecheckpoint
from bytecheckpoint import find_latest_ckpt_path, load, save
from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    ConfigError,
    InvalidPlanError,
    KeyMismatchError,
    ShapeMismatchError,
    StorageError,
)
from frameworks.small_nets import fingerprint, net, of_trainable, trained
from frameworks.wrapped import optimizer_of

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("all_is_saved")


# Keys, shapes and dtypes that do not fit.


def with_head(model: nn.Module) -> nn.Module:
    model.extra_head = nn.Linear(6, 2)  # type: ignore[assignment]
    return model


def test_keys_that_the_checkpoint_has_not(tmp_path: Path) -> None:
    save(tmp_path, {"model": net()}, "ddp")
    model = with_head(net(1))
    before = fingerprint({"model": model})["parameters"]
    with pytest.raises(KeyMismatchError, match=r"not in the checkpoint: model: extra_head.weight.*strict=False"):
        load(tmp_path, {"model": model}, "ddp")
    assert_equal(fingerprint({"model": model})["parameters"], before)
    result = load(tmp_path, {"model": model}, "ddp", strict=False)
    assert result.missing_keys == ("model: extra_head.weight", "model: extra_head.bias")
    assert result.unexpected_keys == ()
    after = model.state_dict()
    assert torch.equal(after["extra_head.weight"], before["extra_head.weight"])
    assert torch.equal(after["embed.weight"], net().state_dict()["embed.weight"])


def test_keys_that_the_model_has_not(tmp_path: Path) -> None:
    model = with_head(net())
    save(tmp_path, {"model": model}, "ddp")
    other = net(1)
    before = fingerprint({"model": other})["parameters"]
    with pytest.raises(KeyMismatchError, match=r"not asked for: model: extra_head.*strict=False leaves them out"):
        load(tmp_path, {"model": other}, "ddp")
    assert_equal(fingerprint({"model": other})["parameters"], before)
    result = load(tmp_path, {"model": other}, "ddp", strict=False)
    assert sorted(result.unexpected_keys) == ["model: extra_head.bias", "model: extra_head.weight"]
    assert torch.equal(other.embed.weight, model.embed.weight)


def test_one_side_alone_may_lack_keys(tmp_path: Path) -> None:
    """``strict`` has the values of a LoadSpec; dtypes stay strict but with False."""
    more, less = with_head(net()), net(1)
    save(tmp_path / "more", {"model": more}, "ddp")
    save(tmp_path / "less", {"model": less}, "ddp")
    assert load(tmp_path / "more", {"model": net(2)}, "ddp", strict="model").unexpected_keys
    assert load(tmp_path / "less", {"model": with_head(net(2))}, "ddp", strict="checkpoint").missing_keys
    with pytest.raises(KeyMismatchError, match="not asked for: model: extra_head"):
        load(tmp_path / "more", {"model": net(2)}, "ddp", strict="checkpoint")
    with pytest.raises(KeyMismatchError, match="not in the checkpoint: model: extra_head"):
        load(tmp_path / "less", {"model": with_head(net(2))}, "ddp", strict="model")
    with pytest.raises(ShapeMismatchError, match="stored dtypes differ"):
        load(tmp_path / "more", {"model": net(2).half()}, "ddp", strict="model")
    with pytest.raises(ConfigError, match=r"strict='modle'.*did you mean 'model'"):
        load(tmp_path / "more", {"model": net(2)}, "ddp", strict="modle")


def test_optimizers_of_more_and_of_fewer_parameters(tmp_path: Path) -> None:
    less, all_of_them = trained(make=lambda m: optimizer_of(m, without="down")), trained()
    save(tmp_path / "less", less, "ddp")
    save(tmp_path / "all", all_of_them, "ddp")
    other = trained(1)
    before = fingerprint(other)["optimizers"]
    with pytest.raises(KeyMismatchError, match=r"not in the checkpoint: optimizer: state.layers.0.down"):
        load(tmp_path / "less", other, "ddp")
    assert_equal(fingerprint(other)["optimizers"], before)
    result = load(tmp_path / "less", other, "ddp", strict=False)
    assert "optimizer: state.layers.0.down.weight" in result.missing_keys
    fewer = trained(1, make=lambda m: optimizer_of(m, without="down"))
    with pytest.raises(KeyMismatchError, match=r"not asked for: optimizer: .*layers.0.down"):
        load(tmp_path / "all", fewer, "ddp")
    result = load(tmp_path / "all", fewer, "ddp", strict=False)
    assert "optimizer: state.layers.0.down.weight.exp_avg" in result.unexpected_keys


def test_another_shape_is_an_error_whatever_strict_says(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Linear(3, 4)}, "ddp")
    for strict in (True, False):
        with pytest.raises(ShapeMismatchError, match="weight"):
            load(tmp_path, {"model": nn.Linear(4, 4)}, "ddp", strict=strict)


def test_another_dtype(tmp_path: Path) -> None:
    model = net()
    save(tmp_path, {"model": model}, "ddp")
    half = net(1).to(torch.bfloat16)
    with pytest.raises(
        ShapeMismatchError, match=r"'embed.weight' is torch.bfloat16, stored is torch.float32.*model.to"
    ):
        load(tmp_path, {"model": half}, "ddp")
    load(tmp_path, {"model": half}, "ddp", strict=False)
    assert_equal(dict(half.state_dict()), dict(copy.deepcopy(model).to(torch.bfloat16).state_dict()))


def load_what_differs(folder: Path) -> None:
    """On the second rank a head is missing, on both the dtypes differ, and there is a key that nobody asks for."""
    other = net(1).to(torch.bfloat16)
    if dist.get_rank() == 1:
        with_head(other)
    before = fingerprint({"model": other})["parameters"]
    with pytest.raises(KeyMismatchError) as caught:
        load(folder, {"model": other}, "ddp")
    for part in (
        "not in the checkpoint: model: extra_head.weight, model: extra_head.bias; strict=False leaves them as they are",
        "not asked for: model: more.weight; strict=False",
        "model: 'embed.weight' is torch.bfloat16, stored is torch.float32",
    ):
        assert part in str(caught.value), str(caught.value)
    assert_equal(fingerprint({"model": other})["parameters"], before)


def test_all_that_differs_on_any_rank_is_one_error(tmp_path: Path) -> None:
    model = net()
    model.more = nn.Linear(2, 2, bias=False)  # type: ignore[assignment]
    save(tmp_path, {"model": model}, "ddp")
    run_ranks(2, load_what_differs, tmp_path, limit_s=LIMIT_S)


def test_other_groups_than_it_was_saved_with(tmp_path: Path) -> None:
    save(tmp_path, trained(), "ddp")  # two groups with different options
    other = trained(1, make=of_trainable(torch.optim.AdamW))
    with pytest.raises(KeyMismatchError, match=r"options: .*lr.*make the groups as they were"):
        load(tmp_path, other, "ddp")


def test_parts_that_were_not_saved(tmp_path: Path) -> None:
    state = trained()
    save(tmp_path, {"model": state["model"]}, "ddp", global_steps=3)
    step = tmp_path / "global_step_3"
    with pytest.raises(CheckpointNotFoundError, match="saved without optimizer: leave 'optimizer' out"):
        load(step, state, "ddp")
    with pytest.raises(CheckpointNotFoundError, match="saved without extra_state"):
        load(step, {"model": state["model"], "extra_state": {}}, "ddp")
    save(tmp_path, state, "ddp", global_steps=3)
    save(tmp_path, {"model": state["model"]}, "ddp", global_steps=3)  # the older save's optimizer does not count
    with pytest.raises(CheckpointNotFoundError, match="saved without optimizer"):
        load(step, state, "ddp")
    load(step, {"model": state["model"]}, "ddp")
    assert find_latest_ckpt_path(tmp_path) == str(step)


def test_a_step_that_does_not_exist(tmp_path: Path) -> None:
    state = {"model": net()}
    for step in (3, 12):
        save(tmp_path, state, "ddp", global_steps=step)
    for path in (tmp_path / "global_step_7", tmp_path):
        with pytest.raises(CheckpointNotFoundError, match=r"has the steps 3, 12: pass '.*global_step_12'"):
            load(path, state, "ddp")
    with pytest.raises(CheckpointNotFoundError, match="as find_latest_ckpt_path gives it"):
        load("/nowhere/at/all", state, "ddp")
    save_state = tmp_path / "plain"
    bytecheckpoint.save_state_dict(save_state, {"a": 1})
    with pytest.raises(CheckpointNotFoundError, match=r"has the steps 3, 12"):
        load(save_state, state, "ddp")


@pytest.mark.parametrize(
    ("arguments", "error", "what_to_do"),
    [
        ({"framework": "megatron"}, ConfigError, r"framework='megatron'.*'fsdp2'.*save_state_dict"),
        ({"framework": "fsdp"}, ConfigError, "wrapped by nothing: pass framework='ddp'"),
        ({"checkpoint_state": {"optimizer": None}}, ConfigError, "must have 'model'"),
        (
            {"checkpoint_state": {"model": nn.Linear(1, 1), "sampler": 1}},
            ConfigError,
            "put anything else into extra_state",
        ),
        ({"checkpoint_state": {"model": {"w": torch.zeros(1)}}}, ConfigError, "the live module.*save_state_dict"),
        ({"checkpoint_state": {"model": nn.Linear(1, 1), "optimizer": {}}}, ConfigError, "live torch.optim.Optimizer"),
        ({"checkpoint_state": {"model": nn.Linear(1, 1), "extra_state": [1]}}, ConfigError, "it must be a dict"),
        ({"checkpoint_state": None}, ConfigError, "NoneType: it must be a dict with 'model'"),
        ({"global_steps": -1}, ConfigError, "must be an int >= 0"),
        ({"global_steps": 1.0}, ConfigError, "must be an int >= 0"),
        ({"global_steps": True}, ConfigError, "must be an int >= 0"),
        ({"role": "judge"}, ConfigError, "BYTECHECKPOINT_ROLE_SUFFIX=judge"),
        ({"callback": "done"}, ConfigError, "without arguments"),
        ({"extra_state_policy": "mine"}, ConfigError, "own, replicated, sharded"),
        ({"ckpt_path": "hdfs://there/it/is"}, ConfigError, "hdfs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("fast", [False, True])
def test_wrong_arguments(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], what_to_do: str, fast: bool
) -> None:
    given = {"ckpt_path": tmp_path, "checkpoint_state": {"model": nn.Linear(1, 1)}, "framework": "ddp", **arguments}
    with pytest.raises(error, match=what_to_do):
        save(**given, fast_saving=fast)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_of_a_load(tmp_path: Path) -> None:
    state = {"model": nn.Linear(1, 1)}
    save(tmp_path, state, "ddp")
    for arguments, what_to_do in (
        ({"framework": "fsdp2 "}, "one of 'ddp', 'fsdp', 'fsdp2'"),
        ({"framework": "fsdp"}, "pass framework='ddp'"),
        ({"role": "judge"}, "BYTECHECKPOINT_ROLE_SUFFIX=judge"),
    ):
        with pytest.raises(ConfigError, match=what_to_do):
            load(**{"ckpt_path": tmp_path, "checkpoint_state": state, "framework": "ddp", **arguments})


def test_a_parameter_that_is_none_of_the_models(tmp_path: Path) -> None:
    state = {"model": nn.Linear(1, 1), "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), momentum=0.9)}
    for fast in (False, True):
        with pytest.raises(InvalidPlanError, match="pass the model that the optimizer was made for"):
            save(tmp_path, state, "ddp", fast)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        save(tmp_path / "file", {"model": net()}, "ddp", global_steps=1)

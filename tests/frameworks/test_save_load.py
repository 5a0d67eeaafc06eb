# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.save`` and ``load`` on one rank: what is saved, what stays unchanged, what other readers load."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import bytecheckpoint
from bytecheckpoint import DDPCheckpointer, find_latest_ckpt_path, load, save
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidPlanError,
)
from bytecheckpoint.training_state import tracker
from frameworks.holding import Gate
from frameworks.small_nets import fingerprint, net, trained
from frameworks.wrapped import optimizer_of, train

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("all_is_saved")


# Contents and paths of a save.


def test_a_run_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    state = {**trained(), "extra_state": {"epoch": 3, "seen": torch.arange(4)}}
    handle = save(tmp_path, state, "ddp", global_steps=100)
    step = tmp_path / "global_step_100"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_100", tracker.TRACKER]
    assert sorted(path.name for path in step.iterdir()) == ["extra_state", "model", "optimizer"]
    assert (tmp_path / tracker.TRACKER).read_text() == "100"
    assert find_latest_ckpt_path(tmp_path) == str(step) == handle.path
    assert handle.staged.done()
    report = handle.report
    assert report is not None
    assert report == handle.committed.result(0)
    assert list(report.parts) == ["extra_state", "optimizer", "model"]
    assert report.summary().count("\n") == 2

    resumed: dict[str, Any] = {**trained(seed=5, steps=0), "extra_state": {}}
    result = load(find_latest_ckpt_path(tmp_path) or "", resumed, "ddp")
    assert (result.path, result.missing_keys, result.unexpected_keys) == (str(step), (), ())
    assert result.parts.keys() == {"model", "optimizer", "extra_state"}
    assert_equal(resumed["extra_state"], {"epoch": 3, "seen": torch.arange(4)})
    losses = train(state["model"], state["optimizer"], 3, seed=9)
    assert train(resumed["model"], resumed["optimizer"], 3, seed=9) == losses
    cache = resumed["model"].cache  # not persistent, so it differs
    resumed["model"].cache.copy_(state["model"].cache)
    assert_equal(fingerprint(resumed)["parameters"], fingerprint(state)["parameters"])
    assert_equal(fingerprint(resumed)["optimizers"], fingerprint(state)["optimizers"])
    assert cache is resumed["model"].cache


def test_the_model_alone_at_the_path_itself(tmp_path: Path) -> None:
    model = net()
    for arguments in ({}, {"global_steps": 7, "ignore_append_global_steps_to_folder": True}):
        save(tmp_path, {"model": model}, "ddp", **arguments)
        assert [path.name for path in tmp_path.iterdir()] == ["model"], "no tracker, which could not find it"
        other = net(1)
        DDPCheckpointer.load(str(tmp_path), {"model": other})
        assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_a_model_on_meta_is_refused_by_name(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path, {"model": net()}, "ddp")
    with torch.device("meta"):
        model = net()
    names = ", ".join(list(model.state_dict())[:20])
    with pytest.raises(InvalidPlanError, match=f"on the meta device.*: {names}.*to_empty"):
        bytecheckpoint.load(tmp_path, {"model": model}, "ddp")


def test_checkpointers_take_the_arguments_of_the_functions(tmp_path: Path) -> None:
    state = trained()
    done: list[str] = []
    handle = DDPCheckpointer.save(tmp_path, state, True, 5, lambda: done.append("done"))
    assert handle.committed.result(LIMIT_S).path == str(tmp_path / "global_step_5")
    other = trained(1, 0)
    DDPCheckpointer.load(tmp_path / "global_step_5", other, fast_loading=True, strict=True)
    assert_equal(fingerprint(other)["optimizers"], fingerprint(state)["optimizers"])
    assert done == ["done"]


def test_plans_are_kept_from_save_to_save(tmp_path: Path) -> None:
    layer = nn.Linear(3, 1017)
    # a unique name, else another test may have cached its plans
    model = nn.Sequential(OrderedDict(of_this_test_alone=layer))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}
    caches = []
    for step in range(3):
        report = save(tmp_path, state, "ddp", step % 2 == 1, step).committed.result(LIMIT_S)
        caches.append([part.plan.cache for part in report.parts.values()])
        nn.init.normal_(layer.weight)
    assert caches == [["miss", "miss"], ["hit", "hit"], ["hit", "hit"]]


def test_saving_again_to_one_path(tmp_path: Path) -> None:
    state = trained()
    for step in (1, 2, 3):
        train(state["model"], state["optimizer"], 1)
        save(tmp_path, state, "ddp", global_steps=1, callback=None)
        other = trained(step, 1)
        load(tmp_path / "global_step_1", other, "ddp")
        assert_equal(fingerprint(other)["parameters"], fingerprint(state)["parameters"])
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        save(tmp_path, {"model": state["model"]}, "ddp", global_steps=1, overwrite=False)
    load(tmp_path / "global_step_1", other, "ddp")


def test_an_existing_part_is_seen_before_another_is_written(tmp_path: Path) -> None:
    state = trained()
    save(tmp_path, {"model": state["model"]}, "ddp")
    with pytest.raises(CheckpointExistsError, match="of model"):
        save(tmp_path, {**state, "extra_state": {"a": 1}}, "ddp", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/training_state.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["latest"] == str(tmp_path / "run" / "global_step_100")
    assert names["state"]["extra_state"]["queue"] == ["a", "b"]


# Nothing is changed.


@pytest.mark.parametrize("fast", [False, True])
def test_saving_changes_nothing(tmp_path: Path, fast: bool) -> None:
    state: dict[str, Any] = trained()
    train(state["model"], state["optimizer"], 1)
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    state["model"].layers["0"].eval()
    before = fingerprint(state)
    save(tmp_path, state, "ddp", fast, 1).committed.result(LIMIT_S)
    assert_equal(fingerprint(state), before)


def test_an_optimizer_without_a_state_stays_so_and_gets_one_without_a_step(tmp_path: Path) -> None:
    fresh = trained(steps=0)
    before = fingerprint(fresh)
    assert before["states"] == [0]
    save(tmp_path / "fresh", fresh, "ddp")
    assert_equal(fingerprint(fresh), before)

    state = trained(steps=2)
    save(tmp_path / "trained", state, "ddp")
    steps: list[int] = []
    fresh["optimizer"].register_step_pre_hook(lambda *_: steps.append(1))
    load(tmp_path / "trained", fresh, "ddp")
    assert steps == []
    assert_equal(fingerprint(fresh)["optimizers"], fingerprint(state)["optimizers"])
    assert fingerprint(fresh)["grads"] == before["grads"]
    load(tmp_path / "fresh", fresh, "ddp")  # and back: the optimizer has no state again
    assert fingerprint(fresh)["states"] == [0]


# Other readers and writers.


def test_each_part_is_a_checkpoint_for_stock_dcp(tmp_path: Path) -> None:
    state = {**trained(), "extra_state": {"epoch": 2}}
    save(tmp_path, state, "ddp")
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    model = net(1)
    values = model.state_dict()
    dcp.load(values, storage_reader=dcp.FileSystemReader(tmp_path / "model"), no_dist=True)
    set_model_state_dict(model, values)
    assert_equal(dict(model.state_dict()), dict(state["model"].state_dict()))

    optimizer = optimizer_of(model)
    values = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.load(values, storage_reader=dcp.FileSystemReader(tmp_path / "optimizer"), no_dist=True)
    set_optimizer_state_dict(model, optimizer, values, options=options)
    assert_equal(optimizer.state_dict(), state["optimizer"].state_dict())

    extra = {"rank_0.epoch": None}
    dcp.load(extra, storage_reader=dcp.FileSystemReader(tmp_path / "extra_state"), no_dist=True)
    assert extra == {"rank_0.epoch": 2}
    for part in ("model", "optimizer", "extra_state"):
        assert bytecheckpoint.verify(tmp_path / part).problems == []


@pytest.mark.parametrize("flatten", [True, False])
def test_parts_that_stock_dcp_wrote_load(tmp_path: Path, flatten: bool) -> None:
    state = trained()
    values = state["model"].state_dict()
    dcp.save(values, checkpoint_id=tmp_path / "model", no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    values = get_optimizer_state_dict(state["model"], state["optimizer"], options=options)
    dcp.save(values, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    other = trained(1, 0)
    load(tmp_path, other, "ddp")
    assert_equal(fingerprint(other)["optimizers"], fingerprint(state)["optimizers"])
    save(tmp_path / "ours", {"model": state["model"]}, "ddp")  # mixes a part that stock DCP wrote with one of ours
    (tmp_path / "optimizer").rename(tmp_path / "ours" / "optimizer")
    other = trained(1, 0)
    load(tmp_path / "ours", other, "ddp")
    assert_equal(fingerprint(other)["optimizers"], fingerprint(state)["optimizers"])


# Interrupted between parts.


def test_a_first_save_that_fails_between_parts_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    save(tmp_path, state, "ddp", global_steps=1)
    Gate(monkeypatch, "model", OSError(28, "no space"))
    with pytest.raises(CheckpointError, match="no space") as raised:
        save(tmp_path, state, "ddp", global_steps=2)
    assert "this save has already committed optimizer" in "".join(raised.value.__notes__)
    assert (tmp_path / tracker.TRACKER).read_text() == "1"
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path / "global_step_2", state, "ddp")
    monkeypatch.undo()
    save(tmp_path, state, "ddp", global_steps=2)
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_2")


def test_a_save_over_another_that_fails_between_parts_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained()
    save(tmp_path, state, "ddp", global_steps=1)
    save(tmp_path, state, "ddp", global_steps=2)
    Gate(monkeypatch, "model", OSError(28, "no space"))
    with pytest.raises(CheckpointError):
        save(tmp_path, state, "ddp", global_steps=2)
    step = tmp_path / "global_step_2"
    before = fingerprint(state)
    with pytest.raises(CheckpointChangedError, match=r"parts are of different saves.*load another step"):
        load(step, state, "ddp")
    assert_equal(fingerprint(state), before)
    load(step, {"model": state["model"]}, "ddp")
    with pytest.warns(RuntimeWarning, match="names step '2', which is not whole: taking .*global_step_1"):
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
    monkeypatch.undo()
    save(tmp_path, state, "ddp", global_steps=2)
    load(step, state, "ddp")


def test_a_save_that_is_committed_during_a_load_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained()
    save(tmp_path, state, "ddp")
    from bytecheckpoint.training_state import loading

    class Late(loading.BcpReader):
        def __init__(self, path: Any, **kwargs: Any) -> None:
            if Path(path).name == "optimizer":
                monkeypatch.undo()
                save(tmp_path, state, "ddp")
            super().__init__(path, **kwargs)

    monkeypatch.setattr(loading, "BcpReader", Late)
    with pytest.raises(CheckpointChangedError, match="load again"):
        load(tmp_path, trained(1), "ddp")
    load(tmp_path, trained(1), "ddp")

# SPDX-License-Identifier: Apache-2.0
"""Tests that a load reports the keys it leaves unfilled, and warns if it fills only some keys of a top-level part."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, LoadReport, LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.dcp import _reader_base as reader_module
from bytecheckpoint.errors import ConfigError, KeyMismatchError
from bytecheckpoint.native import _core
from bytecheckpoint.sharing.asked_keys import RequestedKeys, asked_by_any, compare
from bytecheckpoint.transforms import Slice

MOMENTS = tuple(f"optimizer.state.{n}.{name}" for n in (0, 1) for name in ("exp_avg", "exp_avg_sq", "step"))


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def trained() -> tuple[torch.nn.Linear, torch.optim.Adam]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(params=["whole metadata", "metadata in parts"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Saves a model, its optimizer and a number, and returns the path."""
    if request.param == "metadata in parts":
        monkeypatch.setattr(reader_module, "_MAX_WHOLE_METADATA_BYTES", 0)
    model, optimizer = trained()
    save_state_dict(tmp_path / "ck", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1})
    return tmp_path / "ck"


def by_dcp(path: Path, state: dict[str, Any], planner: Any) -> LoadReport:
    reader = BcpReader(path)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert reader.last_report is not None
    return reader.last_report


LOADS: dict[str, Callable[[Path, dict[str, Any]], LoadReport]] = {
    "load_state_dict": lambda path, state: load_state_dict(path, state, no_dist=True),
    "dcp.load, our planner": lambda path, state: by_dcp(path, state, BcpLoadPlanner()),
    "dcp.load, DCP's planner": lambda path, state: by_dcp(path, state, DefaultLoadPlanner()),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_an_optimizer_before_its_first_step(path: Path, load: Callable[[Path, dict[str, Any]], LoadReport]) -> None:
    model = torch.nn.Linear(3, 2)
    state = {"model": model.state_dict(), "optimizer": torch.optim.Adam(model.parameters()).state_dict()}
    with pytest.warns(RuntimeWarning, match=r"'optimizer'.*'optimizer\.state\.0\.exp_avg'.*and 1 more") as warned:
        report = load(path, state)
    (message,) = [str(warning.message) for warning in warned if warning.category is RuntimeWarning]
    assert str(path) in message
    assert "get_optimizer_state_dict" in message
    assert report.unexpected_keys == MOMENTS
    assert report.num_unexpected_keys == len(MOMENTS)
    assert (report.missing_keys, report.num_missing_keys) == ((), 0)
    assert "6 keys not asked for" in report.summary()
    assert json.loads(report.to_json())["unexpected_keys"] == [*MOMENTS]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_parts_that_nobody_asks_for_are_normal(path: Path, load: Callable[[Path, dict[str, Any]], LoadReport]) -> None:
    report = load(path, {"model": torch.nn.Linear(3, 2).state_dict()})
    assert (report.unexpected_keys, report.num_unexpected_keys) == ((), 0)
    model, optimizer = trained()
    report = load(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0})
    assert (report.missing_keys, report.unexpected_keys) == ((), ())


def test_an_empty_container_asks_for_its_part(path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="'optimizer'"):
        report = load_state_dict(path, {"step": 0, "optimizer": {}}, no_dist=True)
    assert {*MOMENTS} < {*report.unexpected_keys}
    assert all(key.startswith("optimizer.") for key in report.unexpected_keys)


def test_missing_keys_are_told_and_renamed_ones_warned_of(path: Path) -> None:
    weight = torch.nn.Linear(3, 2).state_dict()["weight"]
    bias = torch.zeros(2)
    planner = BcpLoadPlanner(allow_partial_load=True)
    report = by_dcp(path, {"scale": weight, "step": 0}, planner)
    assert (report.missing_keys, report.num_missing_keys, report.missing_parts) == (("scale",), 1, ())
    assert report.unexpected_keys == ()
    with pytest.warns(
        RuntimeWarning, match=r"'model'.*: 'model\.bias'; these keys are not in the checkpoint: 'model\.offset'"
    ):
        report = by_dcp(path, {"model": {"weight": weight, "offset": bias}}, planner)
    assert (report.missing_keys, report.unexpected_keys) == (("model.offset",), ("model.bias",))
    assert torch.equal(bias, torch.zeros(2))


def without_optimizer(tmp_path: Path) -> Path:
    model, _ = trained()
    save_state_dict(tmp_path / "model", {"model": model.state_dict(), "step": 5}, no_dist=True)
    return tmp_path / "model"


LENIENT: dict[str, Callable[[Path, dict[str, Any]], LoadReport]] = {
    "strict='checkpoint'": lambda path, state: load_state_dict(
        path, state, no_dist=True, spec=LoadSpec(strict="checkpoint")
    ),
    "strict=False": lambda path, state: load_state_dict(path, state, no_dist=True, spec=LoadSpec(strict=False)),
    "our planner": lambda path, state: by_dcp(path, state, BcpLoadPlanner(allow_partial_load=True)),
    "DCP's planner": lambda path, state: by_dcp(path, state, DefaultLoadPlanner(allow_partial_load=True)),
}


@pytest.mark.parametrize("load", LENIENT.values(), ids=LENIENT)
def test_a_whole_part_that_got_nothing_is_a_warning(
    tmp_path: Path, load: Callable[[Path, dict[str, Any]], LoadReport]
) -> None:
    path, (model, _) = without_optimizer(tmp_path), trained()
    optimizer = get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))
    state = {"model": model.state_dict(), "optimizer": optimizer, "step": 0, "lr": 0.1}
    with pytest.warns(RuntimeWarning, match=r"has nothing of 'optimizer', so .*make a new optimizer") as warned:
        report = load(path, state)
    assert [warning.category for warning in warned].count(RuntimeWarning) == 1
    assert report.missing_parts == ("optimizer",)
    assert report.num_missing_keys > 8
    assert state["step"] == 5


@pytest.mark.parametrize(
    ("below", "parts"),
    [
        ({"optim": {"state": {"w": {"exp_avg": 0}}, "param_groups": [{"lr": 0.1}]}}, ("app.optim",)),
        ({"optim": {"optimizer": {"state": {"w": {"exp_avg": 0}}}, "step": 0}}, ("app.optim",)),
        ({"model": {"w": 0, "lora": {"a": 0}}}, ()),
        ({"model": {"w": 0}, "lr": 0.1}, ()),
    ],
)
def test_parts_within_a_part(tmp_path: Path, below: dict[str, Any], parts: tuple[str, ...]) -> None:
    """A tutorial of torch has model and optimizer below one key, which is the state of a Stateful."""
    save_state_dict(tmp_path, {"app": {"model": {"w": 1}}}, no_dist=True)
    state = {"app": {"model": {"w": 0}, **below}}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        report = load_state_dict(tmp_path, state, no_dist=True, spec=LoadSpec(strict="checkpoint"))
    assert report.missing_parts == parts
    assert len(warned) == len(parts)
    assert state["app"]["model"]["w"] == 1


def test_the_state_of_an_optimizer_is_a_part_of_it(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"optimizer": {"param_groups": [{"lr": 0.5, "m": {}}]}}, no_dist=True)
    state = {"optimizer": {"state": {"w": {"exp_avg": 0}}, "param_groups": [{"lr": 0.1, "m": {}}]}}
    with pytest.warns(RuntimeWarning, match=r"has nothing of 'optimizer\.state'"):
        load_state_dict(tmp_path, state, no_dist=True, spec=LoadSpec(strict="checkpoint"))
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_in_a_flat_state_only_names_of_optimizers_are_parts(tmp_path: Path) -> None:
    """Adapters alone are loaded like this into a whole model, on purpose."""
    save_state_dict(tmp_path, {"layer.lora_a": 1}, no_dist=True)
    state = {"layer.lora_a": 0, "layer.weight": 0, "norm.weight": 0, "head.weight": 0}
    spec = LoadSpec(strict="checkpoint")
    assert load_state_dict(tmp_path, state, no_dist=True, spec=spec).missing_parts == ()
    flat = {"state.layer.weight.exp_avg": 0, "param_groups.layer.weight.lr": 0}
    with pytest.warns(RuntimeWarning, match=r"has nothing of 'param_groups', 'state'"):
        load_state_dict(tmp_path, {**state, **flat}, no_dist=True, spec=spec)


def test_what_another_rank_found_is_not_missing() -> None:
    stored = [f"optimizer.state.{n}.m" for n in range(4)]
    paths = {f"optimizer.state.{n}.m": ("optimizer", "state", str(n), "m") for n in range(8)}
    stages = [RequestedKeys.of(stored, [key], ["optimizer"], paths) for key in (stored[0], "optimizer.state.7.m")]
    assert stages[1].missing_parts == ("optimizer",)
    assert compare(lambda: stored, stages).missing_parts == ()
    assert compare(lambda: stored, stages[1:]).missing_parts == ("optimizer",)
    everything = RequestedKeys.of(stored, dict.fromkeys(stored), ["optimizer"], paths)
    assert compare(lambda: stored, [everything, stages[1]]).missing_parts == ()


def test_ranks_with_other_specs_are_refused() -> None:
    ranks = [RequestedKeys.of([f"k{n}" for n in range(size)], ["k0"], ["k0"]) for size in (300, 5)]
    for order in (ranks, ranks[::-1]):
        with pytest.raises(ConfigError, match=r"rank 0 chooses from .*, and rank 1 from .* same LoadSpec on all ranks"):
            asked_by_any(order)


@pytest.mark.parametrize("load", {**LOADS, **LENIENT}.values(), ids={**LOADS, **LENIENT})
def test_an_empty_state_is_a_warning(path: Path, load: Callable[[Path, dict[str, Any]], LoadReport]) -> None:
    if load is LENIENT["strict='checkpoint'"]:
        with pytest.raises(KeyMismatchError):
            load(path, {})
        return
    with pytest.warns(RuntimeWarning, match=r"asks for no key.*'bcp ls .*/ck'.*'bcp convert .*--to torch'") as warned:
        report = load(path, {})
    assert [warning.category for warning in warned].count(RuntimeWarning) == 1
    assert report.num_loaded_keys == 0


@pytest.mark.parametrize("load", [LENIENT["strict=False"], LENIENT["our planner"], LENIENT["DCP's planner"]])
def test_no_key_in_common_is_a_warning(path: Path, load: Callable[[Path, dict[str, Any]], LoadReport]) -> None:
    state = {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}
    with pytest.warns(RuntimeWarning, match=r"asks for 'bias', 'weight'; the checkpoint has 'model\.bias', .*rename"):
        load(path, state)


def test_nothing_of_nothing_is_no_warning(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {}, no_dist=True)
    assert load_state_dict(tmp_path, {}, no_dist=True).num_loaded_keys == 0


def test_a_gradient_or_an_entry_keeps_torch_from_making_a_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_state_dict(tmp_path, {"optimizer": get_optimizer_state_dict(model, optimizer)}, no_dist=True)
    fresh = torch.nn.Linear(3, 2)
    fresh(torch.ones(3)).sum().backward()
    with_gradient = torch.optim.Adam(fresh.parameters())
    other = torch.nn.Linear(3, 2)
    with_entry = torch.optim.Adam(other.parameters())
    assert with_entry.state[other.weight] == {}  # as `train()` of schedulefree does
    for owner, of_owner in ((fresh, with_gradient), (other, with_entry)):
        state = {"optimizer": get_optimizer_state_dict(owner, of_owner)}
        with pytest.warns(RuntimeWarning, match=r"optimizer\.state is empty and no parameter has a gradient"):
            load_state_dict(tmp_path, state, no_dist=True)


def test_live_objects_that_got_nothing_are_a_warning(tmp_path: Path) -> None:
    model, optimizer = trained()
    bytecheckpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, "ddp")
    other = torch.nn.ModuleDict({"other": torch.nn.Linear(3, 2)})
    state = {"model": other, "optimizer": torch.optim.Adam(other.parameters())}
    with pytest.warns(RuntimeWarning, match=r"has nothing of what checkpoint_state has as 'model', 'optimizer'"):
        result = bytecheckpoint.load(tmp_path, state, "ddp", strict=False)
    assert len(result.missing_keys) == 4
    assert not state["optimizer"].state
    bytecheckpoint.load(tmp_path, {"model": model}, "ddp", strict=False)


def test_a_number_in_the_state_of_a_live_optimizer_goes_into_its_tensor(tmp_path: Path) -> None:
    model, optimizer = trained()
    for of_parameter in optimizer.state.values():
        of_parameter["step"] = 7  # as optimizers before torch 1.12, and many others, keep it
    bytecheckpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, "ddp")
    model, optimizer = trained()
    steps = [of_parameter["step"] for of_parameter in optimizer.state.values()]
    bytecheckpoint.load(tmp_path, {"model": model, "optimizer": optimizer}, "ddp")
    assert [of_parameter["step"] for of_parameter in optimizer.state.values()] == steps == [7, 7]
    assert all(of_parameter["step"] is step for of_parameter, step in zip(optimizer.state.values(), steps, strict=True))


def test_whoever_knows_is_not_warned(path: Path) -> None:
    planner = BcpLoadPlanner()
    planner.warns = False
    report = by_dcp(path, {"model": {"bias": torch.zeros(2)}}, planner)
    assert report.unexpected_keys == ("model.weight",)

    class Choosing(DefaultLoadPlanner):
        """A user's planner, which may load what it likes."""

    report = by_dcp(path, {"model": {"bias": torch.zeros(2)}}, Choosing())
    assert report.unexpected_keys == ("model.weight",)


def test_tensors_without_elements_are_asked_for(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "none": torch.ones(0, 3)}, "other": {"none": torch.ones(0), "x": 1}}
    save_state_dict(tmp_path, state, no_dist=True)
    report = by_dcp(tmp_path, {"model": state["model"]}, DefaultLoadPlanner())
    assert report.unexpected_keys == ()


def test_the_optimizer_of_torchs_own_state_dicts_is_loaded_whole(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_state_dict(tmp_path, {"optimizer": get_optimizer_state_dict(model, optimizer)})
    fresh = torch.nn.Linear(3, 2)
    state = {"optimizer": get_optimizer_state_dict(fresh, torch.optim.Adam(fresh.parameters()))}
    assert load_state_dict(tmp_path, state).num_unexpected_keys == 0
    assert torch.equal(state["optimizer"]["state"]["bias"]["exp_avg"], optimizer.state_dict()["state"][1]["exp_avg"])


def test_of_many_keys_some_are_named_and_all_are_counted(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"model": {f"{n:04}": n for n in range(1000)}})
    with pytest.warns(RuntimeWarning, match="and 994 more") as warned:
        report = load_state_dict(tmp_path, {"model": {"0000": None}})
    assert all(len(str(warning.message)) < 500 for warning in warned)
    assert (len(report.unexpected_keys), report.num_unexpected_keys) == (256, 999)
    planner = BcpLoadPlanner(allow_partial_load=True)
    with pytest.warns(RuntimeWarning, match=r"nothing is loaded.*'other\.0000'.*and 995 more.*'model\.0000'"):
        report = by_dcp(tmp_path, {"other": {f"{n:04}": None for n in range(1000)}}, planner)
    assert (len(report.missing_keys), report.num_missing_keys) == (256, 1000)


def test_what_any_rank_asks_for_is_asked_for() -> None:
    stored = ["a.x", "a.y", "b.x", "b.y", "c.x"]

    def unfilled(*ranks: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = compare(lambda: stored, [RequestedKeys.of(stored, dict.fromkeys(keys)) for keys in ranks])
        return found.missing_keys, found.unexpected_keys

    assert unfilled(stored) == ((), ())
    assert unfilled(["a.x"], ["a.y"]) == ((), ())
    assert unfilled(["a.x"], ["b.x"]) == ((), ("a.y", "b.y"))
    assert unfilled(["a.x"], stored) == ((), ())
    assert unfilled(["a.x", "a.y"], ["b.y", "d.x"]) == (("d.x",), ("b.x",))
    assert unfilled([], []) == ((), ())


def test_what_was_loaded_and_what_was_not_read(path: Path) -> None:
    is_whole = reader_module._MAX_WHOLE_METADATA_BYTES > 0
    everything = load_state_dict(path, {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "step": 0})
    assert everything.num_loaded_keys == 3
    # The moments: exp_avg and exp_avg_sq of 6 and 2 elements, and the objects of the optimizer beside them.
    assert everything.bytes_unread is None if not is_whole else (everything.bytes_unread or 0) > 4 * 2 * 8
    spec = LoadSpec(include="model", rename={"model": ""}, transforms=[Slice("model.weight", dim=0, begin=0, end=1)])
    part = load_state_dict(path, {"weight": torch.zeros(1, 3), "bias": torch.zeros(2)}, spec=spec)
    assert part.num_loaded_keys == 2
    if is_whole:
        of_step = next(size for name, *_, size, _, _ in contents(path) if name == "step")
        assert part.bytes_unread == (everything.bytes_unread or 0) + of_step + 3 * 4  # a row of weight, too


def contents(path: Path) -> list[Any]:
    return _core.Checkpoint.open(str(path)).contents()


def test_all_of_it(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"w": torch.ones(4), "step": 1})
    report = load_state_dict(tmp_path, {"w": torch.zeros(4), "step": 0})
    assert (report.num_loaded_keys, report.bytes_unread) == (2, 0)
    assert report.table() == "loaded    2 keys\nnot read  0 bytes"


def test_the_table_of_a_load(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(4, 2), "b": torch.ones(2)}, "optimizer": torch.ones(1000)}
    save_state_dict(tmp_path, saved)
    spec = LoadSpec(include="model", rename={"model": ""}, cast="any", strict=False)
    got = {"w": torch.zeros(4, 2, dtype=torch.bfloat16), "head": torch.zeros(2)}
    report = load_state_dict(tmp_path, got, spec=spec)
    assert report.table() == (
        "loaded                 1 key\n"
        "not in the checkpoint  head\n"
        "not asked for          b\n"
        "cast                   w        float32 -> bfloat16\n"
        "renamed                b        from model.b\n"
        "                       w        from model.w\n"
        "not read               4.01 kB"
    )


def test_a_table_of_many_and_of_hostile_keys() -> None:
    keys = tuple(f"key.{number}" for number in range(256))
    report = LoadReport(path="", save_id="", missing_keys=keys, num_missing_keys=5000, unexpected_keys=("a\n\x1b[31m",))
    shown = report.table(most=3).splitlines()
    assert shown[:4] == [
        "not in the checkpoint  key.0",
        "                       key.1",
        "                       key.2",
        "                       and 4,997 more",
    ]
    assert shown[4:] == ["not asked for          a\\n\\x1b[31m"]
    assert len(report.table().splitlines()) == 22
    assert LoadReport(path="", save_id="").table() == ""
    wide = LoadReport(path="", save_id="", casts=(("x" * 10_000, "a", "b"), ("y", "a", "b")))
    assert len(wide.table().splitlines()[1]) < 200

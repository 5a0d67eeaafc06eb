# SPDX-License-Identifier: Apache-2.0
"""``dcp.save`` and ``dcp.load`` with our writer or reader, and no planner or DCP's own: ours plan them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ending_ranks import Ended, EndingRanks, run_script
from torch.distributed.checkpoint import _nested_dict, default_planner, planner_helpers, utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config, verify
from bytecheckpoint.dcp import _plain_call
from bytecheckpoint.probes.of_torch import PLAIN_CALLS

AS_GIVEN = Config(planning="as given")


def state() -> dict[str, Any]:
    return {
        "model": {f"layer.{i}": torch.arange(100.0) + i for i in range(4)},
        "list": [torch.ones(3, dtype=torch.bfloat16), 7],
        "step": 3,
    }


def blank() -> dict[str, Any]:
    return {
        "model": {f"layer.{i}": torch.zeros(100) for i in range(4)},
        "list": [torch.zeros(3).bfloat16(), 0],
        "step": 0,
    }


def save(path: Path, planner: Any = None, config: Config | None = None) -> BcpWriter:
    writer = BcpWriter(path, config=config)
    dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    assert verify(path).is_whole
    return writer


def load(path: Path, planner: Any = None, config: Config | None = None) -> BcpReader:
    reader, got = BcpReader(path, config=config), blank()
    dcp.load(got, storage_reader=reader, planner=planner, no_dist=True)
    torch.testing.assert_close(got, state(), rtol=0, atol=0)
    return reader


def stored(path: Path) -> tuple[Any, Any, list[bytes]]:
    """Returns what does not change from one save of a state to the next: metadata, and the records of the files."""
    metadata = BcpReader(path).read_metadata()
    files = sorted(path.glob("*.distcp"))
    places = {index: (place.offset, place.length) for index, place in metadata.storage_data.items()}
    records = [
        file.read_bytes()[place.offset : place.offset + place.length]
        for file in files
        for place in metadata.storage_data.values()
    ]
    return (metadata.state_dict_metadata, metadata.planner_data), places, records


@pytest.mark.parametrize(
    "given",
    [
        lambda: None,
        DefaultSavePlanner,
        lambda: DefaultSavePlanner(True, False),
    ],
)
def test_the_save_is_that_of_our_planner(tmp_path: Path, given: Callable[[], Any]) -> None:
    planner = given()
    before = dict(vars(planner)) if planner else {}
    report = save(tmp_path / "plain", planner).last_report
    assert report is not None
    assert report.plan.as_given == ""
    assert report.plan.cache in ("miss", "hit")  # DCP's planner has no such cache
    assert not planner or (type(planner) is DefaultSavePlanner and vars(planner) == before)
    save(tmp_path / "explicit", BcpSavePlanner())
    assert stored(tmp_path / "plain") == stored(tmp_path / "explicit")


def test_options_of_the_planner_are_kept(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"nested": {"a": 1}}, storage_writer=writer, planner=planner, no_dist=True)
    assert [*BcpReader(tmp_path).read_metadata().state_dict_metadata] == ["nested"]
    reader, got = BcpReader(tmp_path), {"nested": {"a": 0}, "absent": torch.ones(1)}
    given = DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=True)
    dcp.load(got, storage_reader=reader, planner=given, no_dist=True)
    assert got["nested"] == {"a": 1}
    assert reader.last_report is not None
    assert (reader.last_report.missing_keys, reader.last_report.as_given) == (("absent",), "")


@pytest.mark.parametrize("given", [lambda: None, DefaultLoadPlanner])
def test_the_load_is_that_of_our_planner(tmp_path: Path, given: Callable[[], Any], monkeypatch: Any) -> None:
    save(tmp_path)
    plans: list[Any] = []
    theirs = BcpLoadPlanner.create_local_plan
    monkeypatch.setattr(BcpLoadPlanner, "create_local_plan", lambda self: plans.append(self) or theirs(self))
    report = load(tmp_path, given()).last_report
    assert report is not None
    assert report.as_given == ""
    assert len(plans) == 1


class OfSave(DefaultSavePlanner):
    """A subclass that changes nothing."""


class OfLoad(DefaultLoadPlanner):
    """A subclass that changes nothing."""


class SaysEqual:
    """A hook that claims to equal everything, as ``mock.ANY`` does."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, *args: Any) -> Any:
        return self._theirs(*args)


def with_attribute(planner: Any, name: str, value: Any) -> Any:
    setattr(planner, name, value)
    return planner


def hook_of(planner: Any, name: str) -> Any:
    return with_attribute(planner, name, getattr(planner, name))


TOUCHED_SAVES: dict[str, tuple[Callable[[], Any], str]] = {
    "subclass": (OfSave, "planner: it is a OfSave"),
    "attribute": (lambda: with_attribute(DefaultSavePlanner(), "mine", 1), "planner: its attribute mine was set"),
    "value": (lambda: with_attribute(DefaultSavePlanner(), "mappings", {"a": 1}), "its attribute mappings was set"),
    "option": (lambda: with_attribute(DefaultSavePlanner(), "flatten_state_dict", 1), "flatten_state_dict was set"),
    "hook": (lambda: hook_of(DefaultSavePlanner(), "resolve_data"), "its attribute resolve_data was set"),
    "caching": (lambda: DefaultSavePlanner(enable_plan_caching=True), "its attribute _enable_plan_caching was set"),
    "array": (lambda: with_attribute(DefaultSavePlanner(), "mine", np.ones(3)), "its attribute mine was set"),
    "array in place": (
        lambda: with_attribute(DefaultSavePlanner(), "mappings", {"a": np.ones(3)}),
        "its attribute mappings was set",
    ),
    "hook that says it is equal": (
        lambda: with_attribute(given := DefaultSavePlanner(), "resolve_data", SaysEqual(given.resolve_data)),
        "its attribute resolve_data was set",
    ),
}
TOUCHED_LOADS: dict[str, tuple[Callable[[], Any], str]] = {
    "subclass": (OfLoad, "planner: it is a OfLoad"),
    "attribute": (lambda: with_attribute(DefaultLoadPlanner(), "mine", 1), "planner: its attribute mine was set"),
    "hook": (lambda: hook_of(DefaultLoadPlanner(), "resolve_tensor"), "its attribute resolve_tensor was set"),
    "array": (lambda: with_attribute(DefaultLoadPlanner(), "mine", np.ones(3)), "its attribute mine was set"),
}


@pytest.mark.parametrize(("given", "why"), TOUCHED_SAVES.values(), ids=TOUCHED_SAVES.keys())
def test_a_planner_that_somebody_touched_plans_its_save(tmp_path: Path, given: Callable[[], Any], why: str) -> None:
    report = save(tmp_path, given()).last_report
    assert report is not None
    assert why in report.plan.as_given


@pytest.mark.parametrize(("given", "why"), TOUCHED_LOADS.values(), ids=TOUCHED_LOADS.keys())
def test_a_planner_that_somebody_touched_plans_its_load(tmp_path: Path, given: Callable[[], Any], why: str) -> None:
    save(tmp_path)
    report = load(tmp_path, given()).last_report
    assert report is not None
    assert why in report.as_given


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (DefaultSavePlanner, "create_local_plan"),
        (DefaultSavePlanner, "lookup_object"),
        (default_planner, "create_default_local_save_plan"),
        (default_planner, "flatten_state_dict"),
        (planner_helpers, "_create_write_items"),
        (_nested_dict, "traverse_state_dict"),
        (utils, "find_tensor_shard"),
    ],
)
def test_whoever_replaces_a_function_of_dcp_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str
) -> None:
    called: list[str] = []
    theirs = getattr(holder, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return theirs(*args, **kwargs)

    monkeypatch.setattr(holder, name, noted)
    report = save(tmp_path).last_report
    assert report is not None
    assert report.plan.as_given == f"planner: {name} of DCP was replaced"
    if holder not in (planner_helpers, utils):  # whose functions DCP's other modules have imported, or do not need here
        assert called


REPLACED_EARLY = """
import functools, unittest.mock, sys
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
how, path = sys.argv[1:]
called = []
def noted(theirs, *args, **kwargs):
    called.append(theirs)
    return theirs(*args, **kwargs)
of_module, of_class = default_planner.create_default_local_save_plan, DefaultSavePlanner.resolve_data
instead = {
    "wraps": functools.wraps(of_module)(lambda *a, **k: noted(of_module, *a, **k)),
    "partial": functools.partial(noted, of_module),
    "mock": unittest.mock.MagicMock(side_effect=functools.partial(noted, of_module)),
}
default_planner.create_default_local_save_plan = instead.get(how, of_module)
if how == "method":
    DefaultSavePlanner.resolve_data = functools.wraps(of_class)(lambda *a, **k: noted(of_class, *a, **k))
from bytecheckpoint import BcpWriter
writer = BcpWriter(path)
dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
assert "replaced before this package was imported" in writer.last_report.plan.as_given, writer.last_report.plan
assert called
"""


@pytest.mark.parametrize("how", ["wraps", "partial", "mock", "method"])
def test_a_function_that_was_replaced_before_our_import_is_called(
    tmp_path: Path, ending_ranks: EndingRanks, how: str
) -> None:
    script = "import sys\n[sys.modules.pop(name) for name in [*sys.modules] if name.startswith('bytecheckpoint.dcp')]\n"
    (ended,) = ending_ranks.run(1, run_script, script + REPLACED_EARLY, how, tmp_path)
    assert ended == Ended(0, ended.said)
    assert "Error" not in ended.said


def test_the_setting_leaves_the_planner(tmp_path: Path) -> None:
    saved, loaded = save(tmp_path, config=AS_GIVEN).last_report, load(tmp_path, config=AS_GIVEN).last_report
    assert saved is not None
    assert loaded is not None
    assert saved.plan.as_given == loaded.as_given == "Config(planning='as given')"


REFUSED_LOADS: dict[str, dict[str, Any]] = {
    "a key that is missing": {"absent": torch.ones(3)},
    "a key that is no text": {1: torch.ones(3)},  # type: ignore[dict-item]
    "another shape": {"step": 0, "list": [torch.ones(4), 0]},
    "an object for a tensor": {"list": [7, 7]},
}


@pytest.mark.parametrize("into", REFUSED_LOADS.values(), ids=REFUSED_LOADS.keys())
def test_what_dcp_refuses_to_load_is_an_error_of_its_type(tmp_path: Path, into: dict[str, Any]) -> None:
    save(tmp_path)
    with pytest.raises(CheckpointException) as ours:
        dcp.load(into, storage_reader=BcpReader(tmp_path), no_dist=True)
    with pytest.raises(CheckpointException) as theirs:
        dcp.load(into, storage_reader=BcpReader(tmp_path, config=AS_GIVEN), no_dist=True)
    (error, _), (of_dcp, _) = ours.value.failures[0], theirs.value.failures[0]
    assert isinstance(error, type(of_dcp))
    assert type(of_dcp) in (RuntimeError, ValueError)


def test_what_dcp_refuses_to_save_is_an_error_of_its_type(tmp_path: Path) -> None:
    twice = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    for config in (Config(), AS_GIVEN):
        with pytest.raises(CheckpointException) as raised:
            dcp.save(twice, storage_writer=BcpWriter(tmp_path, config=config), no_dist=True)
        assert isinstance(raised.value.failures[0][0], ValueError)
    assert not [*tmp_path.glob("**/.metadata")]


def test_a_planner_of_ours_stays(tmp_path: Path) -> None:
    planner = BcpSavePlanner(dedup_save_to_lowest_rank=True)
    report = save(tmp_path, planner).last_report
    assert report is not None
    assert report.plan.as_given == ""
    assert report.plan == planner.last_plan


@pytest.fixture
def unknown_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plain_call, "holds", lambda feature: feature is not PLAIN_CALLS)


@pytest.mark.usefixtures("unknown_torch")
def test_with_another_dcp_its_planner_plans(tmp_path: Path) -> None:
    report = save(tmp_path).last_report
    assert report is not None
    assert report.plan.as_given.startswith("DCP of this torch")
    load(tmp_path)


def test_the_call_alone_has_another_planner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A call of stock classes behind it has DCP's planner."""
    save(tmp_path / "ours")
    found: list[str] = []

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            found.append(type(planner).__name__)
            return super().write_data(plan, planner)

    with caplog.at_level(logging.WARNING):
        dcp.save(state(), storage_writer=Writer(tmp_path / "stock"), no_dist=True)
    assert found == ["DefaultSavePlanner"]

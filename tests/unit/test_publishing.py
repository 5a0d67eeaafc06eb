# SPDX-License-Identifier: Apache-2.0
"""What one process publishes, another has bit for bit, whatever it missed; whatever is wrong is an error."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dtypes import NAMES
from support.equality import raw

import bytecheckpoint
from bytecheckpoint import Config, Publisher, PublishReport, Subscriber, Tiers, verify
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    ConfigError,
    KeyMismatchError,
    StagingFullError,
    UnsupportedError,
)
from bytecheckpoint.publishing import kept_copy
from bytecheckpoint.publishing.held_boxes import HeldBox
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import as_place

pytestmark = pytest.mark.filterwarnings("ignore:.*it is on one device with:RuntimeWarning")

ALONE: dict[str, Any] = {"no_dist": True}


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "published") if request.param == "folder" else f"memory://publishing{tmp_path}"


def state_of(value: int = 0) -> dict[str, Any]:
    return {
        "model": {
            "wide": torch.arange(3000, dtype=torch.float32).view(60, 50).to(torch.bfloat16),
            "turned": torch.arange(600, dtype=torch.float64).view(20, 30).t(),
            "scalar": torch.tensor(float(value)),
            "empty": torch.empty(0, 3),
            "layers": [torch.zeros(7, dtype=torch.int64), {"deep": torch.zeros(5, dtype=torch.complex64)}],
        },
        "step": value,
        "notes": {"list": [1, "two"], "none": None},
    }


def blank() -> dict[str, Any]:
    return {
        "model": {
            "wide": torch.zeros(60, 50, dtype=torch.bfloat16),
            "turned": torch.zeros(30, 20, dtype=torch.float64),
            "scalar": torch.tensor(0.0),
            "empty": torch.empty(0, 3),
            "layers": [torch.ones(7, dtype=torch.int64), {"deep": torch.ones(5, dtype=torch.complex64)}],
        },
        "step": -1,
        "notes": {"list": [0, ""], "none": 0},
    }


def change(state: dict[str, Any], version: int) -> None:
    model = state["model"]
    model["wide"][version % 60, version % 50] = version
    model["turned"][version % 30] += 1
    model["scalar"].fill_(version)
    model["layers"][0][version % 7] += version
    model["layers"][1]["deep"][version % 5] = complex(version, -version)
    state["step"] = version


def is_same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(is_same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(is_same, got, wanted))
    if isinstance(wanted, torch.Tensor):
        return got.shape == wanted.shape and torch.equal(raw(got.contiguous()), raw(wanted.contiguous()))
    return bool(got == wanted)


def kinds(place: str) -> list[str]:
    """Returns what is there, such as ``b1`` and ``d2``."""
    names = sorted(folder_at(as_place(place)).folders())
    whole = [name for name in names if folder_at(as_place(f"{place}/{name}")).has(".metadata")]
    return [f"{name[0]}{int(name.partition('-')[2])}" for name in whole if name != "publisher"]


def test_each_version_arrives_bit_for_bit(place: str) -> None:
    publisher = Publisher(place, base_every=4, **ALONE)
    each, some = Subscriber(place, **ALONE), Subscriber(place, **ALONE)
    state, of_each, of_some = state_of(), blank(), blank()
    assert each.update(of_each) is None
    assert (each.version, each.save_id) == (None, "")
    for version in range(1, 15):
        change(state, version)
        report = publisher.publish(state, version, user_metadata={"loss": version})
        assert publisher.version == version
        assert report.kind == ("base" if version == 1 else "delta and base" if version % 4 == 1 else "delta")
        assert each.update(of_each) == version == each.version
        assert each.save_id == report.save_id
        assert each.user_metadata == {"loss": version}
        assert is_same(of_each, state)
        if version in (3, 4, 9, 14):
            assert some.update(of_some) == version
            assert is_same(of_some, state)
        assert each.update(of_each) is None
    late = blank()
    assert Subscriber(place, **ALONE).update(late) == 14
    assert is_same(late, state)


def test_a_base_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    report = Publisher(tmp_path, **ALONE).publish(state_of(3), 3, user_metadata={"loss": 1.0})
    assert isinstance(report, PublishReport)
    path = tmp_path / "base-000000000003"
    got = blank()
    dcp.load(got, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert is_same(got, state_of(3))
    assert verify(path).is_whole
    assert bytecheckpoint.latest(tmp_path) is None, "versions are no steps of a run"


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    """Of random bits, NaNs of all payloads among them, some are changed."""
    dtype = getattr(torch, name)
    draw = random.Random(name)
    num_bytes = 5000 * dtype.itemsize
    most = 1 if dtype == torch.bool else 255
    bits = torch.tensor([draw.randint(0, most) for _ in range(num_bytes)], dtype=torch.uint8)
    turned = bits.clone()
    state = {"a": bits.view(dtype).view(50, 100), "b": turned.view(dtype).view(50, 100).t()}
    got = {
        "a": torch.zeros(num_bytes, dtype=torch.uint8).view(dtype).view(50, 100),
        "b": torch.zeros(num_bytes, dtype=torch.uint8).view(dtype).view(50, 100).t(),
    }
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    for version in range(1, 4):
        report = publisher.publish(state, version)
        assert report.kind == ("base" if version == 1 else "delta")
        assert subscriber.update(got) == version
        for key, value in state.items():
            assert torch.equal(_bits(got[key]), _bits(value)), key
        for _ in range(20):
            bits[draw.randrange(num_bytes)] ^= 1
            turned[draw.randrange(num_bytes)] ^= 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return raw(tensor if tensor.is_contiguous() else tensor.t())


def test_bits_are_compared_not_numbers(tmp_path: Path) -> None:
    state = {"w": torch.tensor([0.0, 1.0, float("nan"), *range(50)])}
    got = {"w": torch.zeros(53)}
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    publisher.publish(state, 1)
    subscriber.update(got)
    assert publisher.publish(state, 2).num_changed == 0, "a NaN is equal to itself"
    state["w"][0] = -0.0
    state["w"].view(torch.int32)[2] += 1  # another NaN
    assert publisher.publish(state, 3).num_changed == 2
    assert subscriber.update(got) == 3
    assert torch.equal(got["w"].view(torch.int32), state["w"].view(torch.int32))


@pytest.mark.parametrize(
    "other",
    [
        lambda state: state["model"].update(scalar=torch.tensor(1.0, dtype=torch.float64)),
        lambda state: state["model"].update(wide=torch.zeros(60, 51, dtype=torch.bfloat16)),
        lambda state: state["model"].update(more=torch.ones(3)),
        lambda state: state["model"].pop("turned"),
        lambda state: state.update(more=1),
        lambda state: state.update(step=torch.tensor(1)),
    ],
)
def test_other_keys_shapes_and_dtypes_make_a_base(tmp_path: Path, other: Callable[[Any], Any]) -> None:
    state = state_of()
    publisher = Publisher(tmp_path, **ALONE)
    publisher.publish(state, 1)
    other(state)
    report = publisher.publish(state, 2)
    assert report.kind == "base"
    assert "keys, shapes, dtypes" in report.reason
    got = {key: value for key, value in state_of().items() if key == "notes"}
    got["model"] = {key: torch.zeros_like(value) for key, value in state["model"].items() if key != "layers"}
    assert Subscriber(tmp_path, **ALONE).update(got) == 2
    assert publisher.publish(state, 3).kind == "delta"


def test_a_delta_that_is_larger_is_a_base(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    got = {"w": torch.ones(1 << 20, dtype=torch.bfloat16)}
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    publisher.publish(state, 1)
    state["w"] += 1
    report = publisher.publish(state, 2)
    assert (report.kind, report.delta_bytes, report.base_bytes) == ("base", 0, 2 << 20)
    state["w"][: 1 << 18] += 1
    assert publisher.publish(state, 3).delta_bytes == 6 << 18
    state["w"][:350_000] += 1  # 2.1 million bytes
    assert "a delta would take" in publisher.publish(state, 4).reason
    assert subscriber.update(got) == 4
    assert torch.equal(got["w"], state["w"])


def test_a_restart_goes_on_with_a_base(place: str) -> None:
    state = state_of()
    Publisher(place, **ALONE).publish(state, 1)
    subscriber, got = Subscriber(place, **ALONE), blank()
    subscriber.update(got)
    change(state, 2)
    report = Publisher(place, **ALONE).publish(state, 2)
    assert (report.kind, report.reason) == ("base", "it is the first of this publisher")
    assert subscriber.update(got) == 2
    assert is_same(got, state)


def test_versions_rise(place: str) -> None:
    publisher = Publisher(place, **ALONE)
    publisher.publish({"a": 1}, 5)
    for version in (5, 4, 0):
        with pytest.raises(ConfigError, match="not larger than 5"):
            publisher.publish({"a": 1}, version)
    for odd in (-1, 10**12, True, "6", 6.0):
        with pytest.raises(ConfigError, match="must be an int from 0"):
            publisher.publish({"a": 1}, odd)  # type: ignore[arg-type]
    assert publisher.publish({"a": 1}, 100).kind == "delta"
    assert kinds(place) == ["b5", "d100"]


def test_another_publisher_is_noticed(place: str) -> None:
    first, second = Publisher(place, **ALONE), Publisher(place, **ALONE)
    first.publish({"w": torch.ones(3)}, 1)
    second.publish({"w": torch.ones(3)}, 2)
    with pytest.raises(CheckpointBusyError, match=r"version 2 is of another publisher.*end the other one"):
        first.publish({"w": torch.ones(3)}, 3)
    assert second.publish({"w": torch.ones(3)}, 3).kind == "delta"
    assert kinds(place) == ["b1", "b2", "d3"]


def test_in_a_store_one_that_was_overtaken_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"memory://publishing{tmp_path}"
    first, second = Publisher(place, **ALONE), Publisher(place, **ALONE)
    begin = first._begin

    def overtaken(*arguments: Any) -> tuple[str, str]:
        begun = begin(*arguments)
        second.publish({"a": 2}, 1)
        return begun

    with monkeypatch.context() as patched:
        patched.setattr(first, "_begin", overtaken)
        with pytest.raises(CheckpointBusyError, match="has published version 1 meanwhile"):
            first.publish({"a": 1}, 1)
    assert kinds(place) == ["b1"]
    # One publishes a base, and the other a delta: each is refused from its next version on.
    found, saved = first._found, second.publish
    monkeypatch.setattr(first, "_found", lambda *arguments: (saved({"a": 2}, 2), found(*arguments))[1])
    first.publish({"a": 1}, 2)
    assert kinds(place) == ["b1", "b2", "d2"]
    for publisher in (first, second):
        with pytest.raises(CheckpointBusyError, match="is of another publisher"):
            publisher.publish({"a": 3}, 3)
    got = {"a": 0}
    assert Publisher(place, **ALONE).publish({"a": 3}, 3).kind == "base"
    assert Subscriber(place, **ALONE).update(got) == 3
    assert got == {"a": 3}


def test_tensors_of_a_device_take_the_way_by_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no device here: what is on the host is treated as if it were on one."""
    monkeypatch.setattr(HeldBox, "is_on_host", property(lambda _: False))
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    state, got = state_of(), blank()
    for version in (1, 2, 3):
        change(state, version)
        publisher.publish(state, version)
        assert subscriber.update(got) == version
        assert is_same(got, state)


def test_two_cannot_publish_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Publisher(tmp_path, **ALONE), Publisher(tmp_path, **ALONE)
    found: list[BaseException] = []
    prune = first._prune

    def meanwhile() -> list[str]:
        with pytest.raises(CheckpointBusyError, match="another publisher is publishing") as caught:
            second.publish({"a": 2}, 2)
        found.append(caught.value)
        return prune()

    monkeypatch.setattr(first, "_prune", meanwhile)
    first.publish({"a": 1}, 1)
    assert len(found) == 1
    assert kinds(str(tmp_path)) == ["b1"]


def test_a_failed_publication_leaves_the_last_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, got = state_of(), blank()
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    publisher.publish(state, 1)
    change(state, 2)
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "_saved", _refuse)
        with pytest.raises(CheckpointError, match="refused"):
            publisher.publish(state, 2)
    assert publisher.version == 1
    assert subscriber.update(got) == 1
    change(state, 3)
    assert publisher.publish(state, 2).kind == "delta", "the copy is that of version 1"
    assert subscriber.update(got) == 2
    assert is_same(got, state)


def _refuse(*_: object) -> None:
    raise CheckpointError("refused")


def test_a_base_that_fails_behind_its_delta_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(tmp_path, base_every=2, **ALONE)
    publisher.publish({"a": 1}, 1)
    publisher.publish({"a": 2}, 2)
    saved = publisher._saved
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "_saved", lambda kind, *rest: _refuse() if kind == "base" else saved(kind, *rest))
        assert publisher.publish({"a": 3}, 3).kind == "delta"
    assert "version 3 has no base: refused" in caplog.text
    assert publisher.publish({"a": 4}, 4).kind == "delta and base"


def test_old_versions_go_but_those_that_a_subscriber_needs(place: str) -> None:
    publisher = Publisher(place, base_every=3, keep_versions=1, **ALONE)
    subscriber, state, got = Subscriber(place, name="slow", **ALONE), state_of(), blank()
    publisher.publish(state, 1)
    subscriber.update(got)
    for version in range(2, 9):
        change(state, version)
        report = publisher.publish(state, version)
    assert kinds(place) == ["b7", *(f"d{v}" for v in range(2, 9))]
    assert subscriber.update(got) == 8
    assert is_same(got, state)
    change(state, 9)
    report = publisher.publish(state, 9)
    assert sorted(report.removed) == [f"delta-{v:012}" for v in range(2, 7)]
    assert kinds(place) == ["b7", "d7", "d8", "d9"]
    subscriber.close()
    subscriber.close()
    assert not any(name.startswith("subscriber") for name in folder_at(as_place(place)).names())


def test_a_place_where_nobody_may_write_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Publisher(tmp_path, **ALONE).publish(state_of(), 1)
    (tmp_path / "subscriber-x.json").mkdir()  # no file can take its name
    subscriber = Subscriber(tmp_path, name="x", **ALONE)
    assert subscriber.update(blank()) == 1
    assert "it is not registered" in caplog.text
    assert Subscriber(tmp_path, registers=False, **ALONE).update(blank()) == 1


def test_other_tensors_get_a_base(tmp_path: Path) -> None:
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    state = state_of()
    publisher.publish(state, 1)
    subscriber.update(blank())
    change(state, 2)
    publisher.publish(state, 2)
    got = blank()
    assert subscriber.update(got) == 2
    assert is_same(got, state)
    again = blank()
    assert subscriber.update(again) == 2, "the version is not newer, but these tensors have none"
    assert is_same(again, state)


def test_a_part_of_the_keys(tmp_path: Path) -> None:
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    state, got = state_of(), {"model": {"turned": torch.zeros(30, 20, dtype=torch.float64)}}
    for version in (1, 2):
        change(state, version)
        publisher.publish(state, version)
        assert subscriber.update(got) == version
        assert torch.equal(got["model"]["turned"], state["model"]["turned"])
    with pytest.raises(KeyMismatchError, match="other"):
        subscriber.update({"other": torch.zeros(1)})


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    publisher, subscriber = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    with pytest.raises(UnsupportedError, match=r"'s' is a Tensor.*sparse"):
        publisher.publish({"s": torch.zeros(2, 2).to_sparse()}, 1)
    with pytest.raises(ConfigError, match="must be a dict"):
        publisher.publish([1], 1)  # type: ignore[arg-type]
    publisher.publish({"w": torch.zeros(3, dtype=torch.bfloat16), "m": torch.nn.Linear(2, 2)}, 1)
    with pytest.raises(ConfigError, match="'m' is a Linear: pass the tensors"):
        subscriber.update({"m": torch.nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match="float32"):
        subscriber.update({"w": torch.zeros(3)})
    assert subscriber.version is None
    with pytest.raises(UnsupportedError, match="on meta: plain tensors"):
        subscriber.update({"w": torch.zeros(3, device="meta")})
    for arguments in ({"base_every": 0}, {"keep_versions": True}):
        with pytest.raises(ConfigError, match="must be an int >= 1"):
            Publisher(tmp_path, **arguments)
    for expires_s in (0, float("nan"), "60", None):
        with pytest.raises(ConfigError, match="expires_s"):
            Subscriber(tmp_path, expires_s=expires_s)  # type: ignore[arg-type]


def test_the_copy_is_said_and_refused_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bytecheckpoint")
    state = {"w": torch.zeros(1000), "b": torch.zeros(10, dtype=torch.bfloat16)}
    publisher = Publisher(tmp_path, **ALONE)
    with monkeypatch.context() as patched:
        patched.setattr(kept_copy._core, "available_memory_bytes", lambda: 1000)
        with pytest.raises(StagingFullError, match=r"takes 4.02 kB on this rank .* base_every=1"):
            publisher.publish(state, 1)
        assert kinds(str(tmp_path)) == []
        alone = Publisher(tmp_path, base_every=1, **ALONE)
        assert (alone.publish(state, 1).copy_bytes, alone.publish(state, 2).kind) == (0, "base")
    assert publisher.publish(state, 3).copy_bytes == 4020
    publisher.publish(state, 4)
    assert caplog.text.count("the copy of what was published takes 4.02 kB") == 1


def test_tiers_publish_in_the_nearest_place(tmp_path: Path) -> None:
    tiers = Tiers(near=tmp_path / "near", durable=tmp_path / "durable")
    Publisher(tiers, **ALONE).publish({"a": 1}, 1)
    got = {"a": 0}
    assert Subscriber(tiers, config=Config(), **ALONE).update(got) == 1
    assert got == {"a": 1}
    assert kinds(str(tmp_path / "near")) == ["b1"]

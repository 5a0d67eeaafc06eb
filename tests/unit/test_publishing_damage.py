# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to what is published, a subscriber stands at a version that was published, or says that it does not.

Versions are damaged, removed, moved and replaced, between two updates and within one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint import Publisher, Subscriber, save_state_dict
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.publishing import deltas, subscriber
from bytecheckpoint.publishing.held_boxes import held_in
from bytecheckpoint.publishing.published import Standing, folder_name, noted

ALONE: dict[str, Any] = {"no_dist": True}
NUMEL = 100_000


class Run:
    """A publisher, and what it has published of one tensor by version."""

    def __init__(self, place: Path, **options: Any) -> None:
        self.place = place
        self.publisher = Publisher(place, **ALONE, **options)
        self.state = {"w": torch.zeros(NUMEL), "step": 0}
        self.versions: dict[int, torch.Tensor] = {}

    def publish(self, *versions: int) -> None:
        for version in versions:
            self.state["w"][version::1000] += 1
            self.state["step"] = version
            self.publisher.publish(self.state, version)
            self.versions[version] = self.state["w"].clone()

    def folder(self, kind: str, version: int) -> Path:
        return self.place / folder_name(kind, version)

    def is_at(self, got: dict[str, Any], version: int) -> bool:
        return torch.equal(got["w"], self.versions[version]) and got["step"] == version


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "published", base_every=4)


def blank() -> dict[str, Any]:
    return {"w": torch.full((NUMEL,), -1.0), "step": -1}


def damage(folder: Path) -> None:
    """Changes a byte of the values that a checkpoint has."""
    checkpoint = _core.Checkpoint.open(str(folder))
    (key,) = (name for name, dtype, *_ in checkpoint.contents() if dtype == "float32")
    ((offset, num_bytes),) = checkpoint.elements(key)
    (file,) = folder.glob("*.distcp")
    with file.open("r+b") as opened:
        opened.seek(offset + num_bytes - 1)
        opened.write(b"\x55")


@pytest.mark.parametrize("what", ["values", "metadata"])
def test_a_damaged_delta_changes_nothing(run: Run, what: str, caplog: pytest.LogCaptureFixture) -> None:
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1)
    taker.update(got)
    run.publish(2, 3)
    if what == "values":
        damage(run.folder("delta", 3))
    else:
        (run.folder("delta", 3) / ".metadata").write_bytes(b"no metadata")
    assert taker.update(got) == 2, "the newest that can be reached"
    assert run.is_at(got, 2)
    assert "delta-000000000003 is damaged" in caplog.text
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError):
            taker.update(got)
        assert taker.version == 2
        assert run.is_at(got, 2)
    if what == "metadata":
        return  # the publisher takes it for one that was never committed, and is refused: it is there
    run.publish(4)
    with pytest.raises(CorruptCheckpointError):
        taker.update(got)
    run.publish(5)  # a base, too
    assert taker.update(got) == 5
    assert run.is_at(got, 5)


def test_a_damaged_base_is_gone_around(run: Run) -> None:
    run.publish(*range(1, 7))
    damage(run.folder("base", 5))
    taker, got = Subscriber(run.place, **ALONE), blank()
    assert taker.update(got) == 6, "by base 1, and five deltas"
    assert run.is_at(got, 6)


def test_nothing_but_a_damaged_base(run: Run) -> None:
    run.publish(1)
    damage(run.folder("base", 1))
    taker, got = Subscriber(run.place, **ALONE), blank()
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError):
            taker.update(got)
        assert taker.version is None


def test_what_is_missing_is_gone_around(run: Run) -> None:
    taker, got = Subscriber(run.place, registers=False, **ALONE), blank()
    run.publish(1, 2)
    taker.update(got)
    run.publish(3, 4, 5, 6)
    shutil.rmtree(run.folder("delta", 4))
    assert taker.update(got) == 6, "by base 5"
    assert run.is_at(got, 6)


def test_deltas_that_are_moved_or_copied_count_for_nothing(run: Run, tmp_path: Path) -> None:
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1, 2)
    assert taker.update(got) == 2
    other = Run(tmp_path / "other", base_every=100)
    other.publish(1, 2, 3)
    shutil.copytree(other.folder("delta", 3), run.folder("delta", 3))  # builds on version 2 of another publisher
    shutil.copytree(run.folder("delta", 2), run.folder("delta", 4))
    assert taker.update(got) is None
    assert run.is_at(got, 2)


def test_a_place_that_was_emptied_and_is_published_to_anew(run: Run) -> None:
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1, 2, 3)
    taker.update(got)
    shutil.rmtree(run.place)
    again = Run(run.place)
    again.publish(1, 2, 3)
    assert taker.update(got) is None
    again.publish(4)
    assert taker.update(got) == 4, "deltas 2 and 3 are not those that it has seen"
    assert again.is_at(got, 4)


def test_the_base_is_removed_while_it_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publish(1, 2)
    taker, got = Subscriber(run.place, registers=False, **ALONE), blank()
    load, calls = subscriber.load_state_dict, []

    def meanwhile(path: Any, *args: Any, **options: Any) -> Any:
        calls.append(path)
        if len(calls) == 1:
            run.publish(3, 4, 5)
            shutil.rmtree(run.folder("base", 1))
        return load(path, *args, **options)

    monkeypatch.setattr(subscriber, "load_state_dict", meanwhile)
    assert taker.update(got) == 5
    assert [path.name for path in calls] == [folder_name("base", 1), folder_name("base", 5)]
    assert run.is_at(got, 5)


def test_a_delta_is_removed_while_it_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    taker, got = Subscriber(run.place, registers=False, **ALONE), blank()
    run.publish(1)
    taker.update(got)
    run.publish(2, 3)
    load = deltas.load_state_dict

    def meanwhile(path: Any, *args: Any, **options: Any) -> Any:
        if 5 not in run.versions:
            run.publish(4, 5)
            shutil.rmtree(run.folder("delta", 3))
        return load(path, *args, **options)

    monkeypatch.setattr(deltas, "load_state_dict", meanwhile)
    assert taker.update(got) == 5
    assert run.is_at(got, 5)


def test_a_registered_reader_keeps_what_it_reads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publisher = Publisher(run.place, base_every=2, keep_versions=1, **ALONE)
    run.publish(1, 2)
    taker, got = Subscriber(run.place, **ALONE), blank()
    load = subscriber.load_state_dict

    def meanwhile(path: Any, *args: Any, **options: Any) -> Any:
        run.publish(3, 4, 5)
        return load(path, *args, **options)

    monkeypatch.setattr(subscriber, "load_state_dict", meanwhile)
    assert taker.update(got) == 2
    assert run.is_at(got, 2)
    monkeypatch.undo()
    assert taker.update(got) == 5
    run.publish(6)
    assert not run.folder("base", 1).exists()


def test_what_breaks_off_while_it_is_applied_needs_a_base(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1)
    taker.update(got)
    run.publish(2)

    def interrupted(*_: object) -> None:
        got["w"][5] = 77
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(deltas.ReadDelta, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            taker.update(got)
    assert taker.version is None
    assert taker.update(got) == 2
    assert run.is_at(got, 2)


@pytest.mark.parametrize("positions", [[5, 4], [3, 3], [0, NUMEL]])
def test_positions_that_do_not_fit_are_refused(run: Run, positions: list[int]) -> None:
    """Their checksums are right: somebody has crafted the delta."""
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1)
    taker.update(got)
    assert taker._at is not None
    crafted = {
        f"positions:w@0+{NUMEL}": torch.tensor(positions, dtype=torch.uint32),
        f"values:w@0+{NUMEL}": torch.ones(2),
        "version": 2,
    }
    about = noted(Standing(2, taker._at.publisher), 1, None)
    save_state_dict(run.folder("delta", 2), crafted, user_metadata=about, **ALONE)
    with pytest.raises(CorruptCheckpointError, match="must ascend inside"):
        taker.update(got)
    assert run.is_at(got, 1)


def test_values_of_another_dtype_are_refused(run: Run) -> None:
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1)
    taker.update(got)
    assert taker._at is not None
    crafted = {
        f"positions:w@0+{NUMEL}": torch.tensor([1], dtype=torch.uint32),
        f"values:w@0+{NUMEL}": torch.ones(1, dtype=torch.float64),
        "version": 2,
    }
    save_state_dict(
        run.folder("delta", 2), crafted, user_metadata=noted(Standing(2, taker._at.publisher), 1, None), **ALONE
    )
    with pytest.raises(CheckpointError, match="float64"):
        taker.update(got)
    assert run.is_at(got, 1)


def test_tensors_in_memory_that_was_freed_are_others(run: Run) -> None:
    taker, got = Subscriber(run.place, **ALONE), blank()
    memory = torch.zeros(NUMEL).numpy()
    got["w"] = torch.from_numpy(memory)
    run.publish(1)
    taker.update(got)
    run.publish(2)
    memory[:] = 3
    del got["w"]
    got["w"] = torch.from_numpy(memory)  # at the same address
    assert taker.update(got) == 2
    assert run.is_at(got, 2)


def test_tensors_that_were_written_to_get_a_base(run: Run) -> None:
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1)
    taker.update(got)
    got["w"][5] = 77
    run.publish(2)
    assert taker.update(got) == 2
    assert run.is_at(got, 2)
    got["w"].view(10, -1)[3].zero_()
    assert taker.update(got) == 2, "the version is not newer, but the tensor does not have it"
    assert run.is_at(got, 2)
    assert taker.update(got) is None
    run.publish(3)
    run.folder("base", 1).rename(run.place / "away")
    assert taker.update(got) == 3, "its own writes do not count: it takes the delta"


def test_a_base_that_fails_leaves_no_empty_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy was made for other keys, and has never been filled."""
    taker, got = Subscriber(run.place, **ALONE), blank()
    run.publish(1)
    taker.update(got)
    run.state["w"][7] = 7

    def refuse(*_: object) -> None:
        raise CheckpointError("refused")

    with monkeypatch.context() as patched:
        patched.setattr(run.publisher, "_saved", refuse)
        with pytest.raises(CheckpointError, match="refused"):
            run.publisher.publish({**run.state, "more": torch.zeros(3)}, 2)
    copy = run.publisher._copy
    assert copy is not None
    copy.take(held_in(("", ""), run.state).boxes)  # memory that was freed may hold just this
    run.publish(2)
    assert taker.update(got) == 2
    assert run.is_at(got, 2)


def test_a_stateful_is_asked_once_for_a_version(tmp_path: Path) -> None:
    """Else the base has what it says the second time, and deltas build on what it said the first time."""

    class Counting:
        num_calls = 0

        def state_dict(self) -> dict[str, Any]:
            self.num_calls += 1
            return {"w": torch.zeros(NUMEL).index_fill_(0, torch.tensor([self.num_calls]), 1.0)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    app, got = Counting(), {"app": {"w": torch.ones(NUMEL)}}
    publisher, taker = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    for version in (1, 2, 3):
        assert publisher.publish({"app": app}, version).kind == ("base" if version == 1 else "delta")
        assert app.num_calls == version
        assert taker.update(got) == version
        assert got["app"]["w"].nonzero().tolist() == [[version]]


def test_tensors_without_elements_count_as_others(tmp_path: Path) -> None:
    publisher, taker = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    publisher.publish({"w": torch.zeros(9), "none": torch.zeros(0, 3)}, 1)
    state = {"w": torch.zeros(9), "none": torch.zeros(0, 5), "more": torch.zeros(0)}
    assert publisher.publish(state, 2).kind == "base"
    assert taker.update(state) == 2


def test_a_registration_that_fails_is_made_up_for(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.publish(1)
    file = run.place / "subscriber-x.json"
    file.mkdir()  # no file can take its name
    taker, got = Subscriber(run.place, name="x", **ALONE), blank()
    assert taker.update(got) == 1
    assert taker.update(got) is None
    assert caplog.text.count("it is not registered") == 1
    file.rmdir()
    taker.update(got)
    assert file.is_file()
    taker.close()
    assert not file.exists()


def test_numbers_go_into_a_tensor_from_a_delta_too(tmp_path: Path) -> None:
    publisher, taker = Publisher(tmp_path, **ALONE), Subscriber(tmp_path, **ALONE)
    got = {"w": torch.ones(9), "step": torch.tensor(0)}
    for version in (1, 2, 3):
        publisher.publish({"w": torch.zeros(9), "step": version}, version)
        assert taker.update(got) == version
        assert torch.equal(got["step"], torch.tensor(version))

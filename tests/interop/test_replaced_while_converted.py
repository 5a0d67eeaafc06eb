# SPDX-License-Identifier: Apache-2.0
"""A conversion is of one save: another one that takes its place meanwhile is an error, and never mixed in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from bytecheckpoint import LoadSpec, load_state_dict
from bytecheckpoint.convert import convert, destination
from bytecheckpoint.errors import CheckpointChangedError, ConfigError
from bytecheckpoint.load_spec.transform import Tensors, Transform
from bytecheckpoint.transforms import Slice
from interop.replaced_sources import KEYS, NUMEL, values, write

KINDS = ("bcp", "dcp", "safetensors", "torch")


def replacing(monkeypatch: pytest.MonkeyPatch, replace: Callable[[], None]) -> None:
    """Makes ``replace`` run when a conversion has made its plan, and before a worker opens the source."""
    real = destination.run_pieces

    def late(*args: Any, **kwargs: Any) -> None:
        replace()
        real(*args, **kwargs)

    monkeypatch.setattr(destination, "run_pieces", late)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_replaced_before_the_workers_open_it(
    kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write(kind, source, 1)
    replacing(monkeypatch, lambda: write(kind, source, 2))
    with pytest.raises(CheckpointChangedError, match=r"source.*since"):
        convert(source, tmp_path / "out", to="bcp", workers=workers, shard_size="400KB")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    # What was begun is of a save that is gone.
    with pytest.raises(ConfigError, match="another source"):
        convert(source, tmp_path / "out", to="bcp", shard_size="400KB", resume=True)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_written_in_place_while_it_is_read(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(kind, source, 1)
    files = [source] if kind == "torch" else sorted(each for each in source.iterdir() if each.suffix != ".metadata")
    last = files[-1]

    def rewrite(done: int, total: int) -> None:
        with last.open("r+b") as file:  # the same inode, the same length
            file.seek(-1, 2)
            file.write(b"\1")

    with pytest.raises(CheckpointChangedError, match=last.name):
        convert(source, tmp_path / "out", to="bcp", shard_size="400KB", progress=rewrite)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_source_is_converted_and_resumed(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(kind, source, 1)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", to="bcp", shard_size="400KB", progress=stopping)
    report = convert(source, tmp_path / "out", to="bcp", shard_size="400KB", resume=True, workers=1)
    assert report.num_resumed > 0
    got = {key: torch.zeros(NUMEL) for key in KEYS}
    load_state_dict(tmp_path / "out", got, no_dist=True)
    assert all(torch.equal(got[key], value) for key, value in values(1).items())


def stopping(done: int, total: int) -> None:
    if done > total * 0.55:
        raise KeyboardInterrupt


def late_rank(base: str) -> None:
    if dist.get_rank() == 1:
        real = destination.run_pieces

        def late(*args: Any, **kwargs: Any) -> None:
            write("bcp", Path(base, "source"), 2)
            real(*args, **kwargs)

        destination.run_pieces = late
    with pytest.raises(CheckpointChangedError):
        convert(f"{base}/source", f"{base}/out", process_group=dist.group.WORLD, shard_size="400KB")


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    write("bcp", tmp_path / "source", 1)
    run_ranks(2, late_rank, str(tmp_path))
    assert not (tmp_path / "out").exists()


class Part(Transform):
    """A transform of a user, which no field describes."""

    def __init__(self, begin: int) -> None:
        self._begin = begin

    def apply(self, tensors: Tensors) -> None:
        for name in [*tensors.names()]:
            tensors.give(name, tensors.take(name).narrow(0, self._begin, 50_000))


SPECS = {
    "slice": (Slice("*", end=50_000), Slice("*", begin=50_000)),
    "own": (Part(0), Part(50_000)),
    "rename": ({f"w{n}": f"x{n}" for n in range(4)}, {f"w{n}": f"x{3 - n}" for n in range(4)}),
}


def spec_of(made_of: Any) -> LoadSpec:
    return LoadSpec(rename=made_of) if isinstance(made_of, dict) else LoadSpec(transforms=[made_of])


@pytest.mark.parametrize("to", ["safetensors", "bcp", "dcp"])
@pytest.mark.parametrize("kind", [*SPECS])
def test_another_spec_does_not_go_on(kind: str, to: Any, tmp_path: Path) -> None:
    write("bcp", tmp_path / "source", 1)
    first, second = map(spec_of, SPECS[kind])
    options: dict[str, Any] = {"to": to, "shard_size": "200KB"}
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "source", tmp_path / "out", spec=first, progress=stopping, **options)
    with pytest.raises(ConfigError, match="other arguments"):
        convert(tmp_path / "source", tmp_path / "out", spec=second, resume=True, **options)
    again, _ = map(spec_of, SPECS[kind])  # another object that says the same
    assert convert(tmp_path / "source", tmp_path / "out", spec=again, resume=True, **options).num_resumed > 0

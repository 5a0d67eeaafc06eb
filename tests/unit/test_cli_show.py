# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp show``: statistics and slices of tensors, reprs of objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import HOSTILE, as_json, run, save, state, stock

from bytecheckpoint.contents import values as contents_values


class Harmful:
    """Unpickling it makes a directory."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.mkdir, (Path("it ran"),)


@pytest.mark.parametrize("by_stock", [False, True])
def test_statistics(tmp_path: Path, by_stock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of tensors that are read in many pieces are exact where they can be."""
    monkeypatch.setattr(contents_values.pieces, "__defaults__", (50,))
    generator = torch.Generator().manual_seed(3)
    values = {
        "floats": torch.randn(20, 30, generator=generator),
        "small": torch.randn(40, generator=generator).to(torch.bfloat16),
        "large": torch.tensor([2**62 + 1, -(2**62) - 1]),
        "unsigned": torch.tensor([0, -1, 5]).view(torch.uint64),
        "odd": torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 2.0]),
        "complex": torch.tensor([3 + 4j, 0j]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(4.0),
        "bits": torch.tensor([True, False]),
    }
    dcp.save(values, storage_writer=dcp.FileSystemWriter(tmp_path)) if by_stock else save(tmp_path, values)
    for name in ("floats", "small"):
        shown, exact = as_json("show", str(tmp_path), name), values[name].double()
        assert (shown["min"], shown["max"]) == (float(exact.min()), float(exact.max()))
        assert shown["mean"] == pytest.approx(float(exact.mean()), rel=1e-12)
        assert shown["std"] == pytest.approx(float(exact.std()), rel=1e-12)
    wanted = {
        "large": {"min": -(2**62) - 1, "max": 2**62 + 1},
        "unsigned": {"min": 0, "max": 2**64 - 1, "zeros": 1},
        "odd": {"min": 0.0, "max": 2.0, "mean": 1.0, "nan": 1, "inf": 2, "zeros": 1},
        "complex": {"min": 0.0, "max": 5.0, "zeros": 1},
        "empty": {"min": None, "mean": None, "elements": 0, "nan": 0},
        "scalar": {"mean": 4.0, "std": None, "shape": []},
        "bits": {"min": 0, "max": 1, "mean": 0.5},
    }
    for name, facts in wanted.items():
        shown = as_json("show", str(tmp_path), name)
        assert {key: shown[key] for key in facts} == facts, name


def test_slices(tmp_path: Path) -> None:
    path = save(tmp_path)
    embed = state()["model"]["embed"]
    for text, part in (
        ("0:2,:", embed[0:2]),
        ("3,-1", embed[3, -1]),
        ("::7,1:9:4", embed[::7, 1:9:4]),
        ("5:5", embed[5:5]),
    ):
        assert as_json("show", path, "model.embed", "--slice", text)["slice"] == part.tolist()
    assert "tensor([[0., 1.]])" in run("show", path, "model.embed", "--slice", ":1,:2").output
    for wrong in ("a", "1,2,3", "99", "::0", "::-1", "1:2:3:4"):
        result = run("show", path, "model.embed", "--slice", wrong)
        assert result.exit_code == 2, wrong
        assert result.stderr.count("\n") == 1


def test_objects(tmp_path: Path) -> None:
    path = save(tmp_path, {"step": 7, "text": "a\n\x1b[31m\u202e", "set": {1}, "evil": Harmful()})
    assert as_json("show", path, "step")["value"] == 7
    assert as_json("show", path, "text")["value"] == "a\n\x1b[31m\u202e"
    assert "\x1b" not in run("show", path, "text").output
    result = run("show", path, "evil")
    assert result.exit_code == 2
    assert "weights_only" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("it ran").exists()
    with torch.serialization.safe_globals([set]):
        shown = as_json("show", path, "set")
    assert (shown["value"], shown["repr"], shown["type"]) == (None, "{1}", "set")


def test_names(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert as_json("show", path, HOSTILE)["name"] == HOSTILE
    result = run("show", path, "absent\n")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    parts = stock("2.13.0-no_collectives")
    name = as_json("ls", parts)["items"][0]["name"]
    assert "--rank" in run("show", parts, name).stderr
    assert as_json("show", parts, name, "--rank", "1")["rank"] == 1


def test_quantized(tmp_path: Path) -> None:
    path = save(tmp_path, {"q": torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8)})
    assert as_json("show", path, "q", "--slice", "1")["slice"] == 2.0
    assert as_json("show", path, "q")["max"] == 2.0

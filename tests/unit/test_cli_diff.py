# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp diff``: it compares the structure, and the values bit by bit, whatever shards they are in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json, run, save, state, stock
from unit.dcp_by_hand import cut, save_by_hand

from bytecheckpoint.contents import values


def differences(a: str, b: str, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["name"], each["what"]): each for each in as_json("diff", a, b, *options, code=1)["differences"]}


def test_equal(tmp_path: Path) -> None:
    a = save(tmp_path / "a")
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "b"), no_dist=True)
    told = as_json("diff", a, str(tmp_path / "b"))
    assert (told["equal"], told["compared"], told["differences"]) == (True, 5, [])
    assert run("diff", a, a).output == "5 keys equal, 0 not\n"


def test_shards_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values.pieces, "__defaults__", (1000,))
    value = {"t": torch.randn(400, 300, generator=torch.Generator().manual_seed(1))}
    a = save(tmp_path / "a", value)
    save_by_hand(cut(value, 3), tmp_path / "b")
    assert as_json("ls", str(tmp_path / "b"))["items"][0]["shards"] > 1
    assert as_json("diff", a, str(tmp_path / "b"))["equal"]
    assert as_json("diff", str(tmp_path / "b"), a)["equal"]
    value["t"][399, 299] += 1
    told = differences(save(tmp_path / "c", value), str(tmp_path / "b"))
    assert told["t", "values"]["different"] == 1
    assert told["t", "values"]["elements"] == 120_000


def test_values(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    alike = {"n": nan, "i": torch.arange(2)}
    a = save(tmp_path / "a", {"t": torch.tensor([nan, nan, 1.0, 0.0, inf, inf, 5.0]), "o": [1], **alike})
    b = save(tmp_path / "b", {"t": torch.tensor([nan, 2.0, 1.5, -0.0, inf, 1.0, 5.0]), "o": [2], **alike})
    told = differences(a, b)
    assert set(told) == {("t", "values"), ("o", "values")}
    of_t = told["t", "values"]
    assert (of_t["different"], of_t["elements"], of_t["nan_in_one"]) == (4, 7, 1)
    assert of_t["max_abs_difference"] == "Infinity"
    assert "t: 4 of 7 elements differ, by inf at most, 1 NaN in one of the two only" in run("diff", a, b).output


def test_structure(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"only": 1, **{name: torch.ones(2) for name in "sdkv"}})
    b = save(tmp_path / "b", {"new\n": 1, "s": torch.ones(3), "d": torch.ones(2).int(), "k": 1, "v": torch.zeros(2)})
    told = as_json("diff", a, b, "--structure-only", code=1)
    assert [each["name"] for each in told["only_in_a"]] == ["only"]
    assert [each["name"] for each in told["only_in_b"]] == ["new\n"]
    different = {(each["name"], each["what"]) for each in told["differences"]}
    assert different == {("s", "shape"), ("d", "dtype"), ("k", "kind")}
    assert ("v", "values") in differences(a, b)
    assert f"only in {b}: new\\n\n" in run("diff", a, b).output


def test_stock_checkpoints() -> None:
    assert run("diff", stock("2.13.0-plain"), stock("2.13.0-plain")).exit_code == 0
    assert run("diff", stock("2.13.0-plain"), stock("2.13.0-dtypes"), "--structure-only").exit_code == 1
    assert run("diff", stock("2.13.0-plain"), "absent").exit_code == 2


def test_tolerance(tmp_path: Path) -> None:
    nan = float("nan")
    a = save(tmp_path / "a", {"f": torch.tensor([nan, 100.0, 0.0, 1.0]), "i": torch.tensor([1, 2]), "z": torch.ones(2)})
    near = {"f": torch.tensor([nan, 100.1, 1e-9, 1.0]), "i": torch.tensor([1, 3]), "z": torch.ones(2)}
    b = save(tmp_path / "b", near)
    assert differences(a, b)["f", "values"]["different"] == 2
    of_f = differences(a, b, "--tolerance", "1e-2")["f", "values"]  # 0 and 1e-9 are far apart, in relation
    assert (of_f["different"], of_f["max_abs_difference"]) == (1, pytest.approx(1e-9))
    left = differences(a, b, "--tolerance", "1e-2:1e-8")
    assert set(left) == {("i", "values")}, "integers are compared bit by bit"
    assert (
        run("diff", a, b, "--tolerance", "1e-2:1e-8").output.splitlines()[-1] == "2 keys equal within tolerance, 1 not"
    )
    assert run("diff", a, b, "--tolerance", "1e-2:1e-8", "--exclude", "i").exit_code == 1  # B has it
    for wrong in ("-1", "x", "1:inf", "nan"):
        assert run("diff", a, b, "--tolerance", wrong).exit_code == 2


def test_lines_are_limited(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {f"k{i:03}": torch.zeros(1) for i in range(150)})
    b = save(tmp_path / "b", {f"k{i:03}": torch.ones(1) for i in range(150)})
    lines = run("diff", a, b).output.splitlines()
    assert lines[-2:] == ["and 50 more; --limit 0 lists all", "0 keys equal, 150 not"]
    assert len(lines) == 102
    assert len(run("diff", a, b, "--limit", "0").output.splitlines()) == 151
    assert len(as_json("diff", a, b, "--limit", "1", code=1)["differences"]) == 150

# SPDX-License-Identifier: Apache-2.0
"""Loads into tensors that share memory: the last key counts as a whole, as it does with DCP's own reader.

The last one by its name: ``dcp.load`` sorts the keys.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config

THREADS = Config(load_io_threads=4)
ROOTS = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # read in two ways, if the second one is in memory


class OwnNamesPlanner(DefaultLoadPlanner):
    """Resolves as DCP's planner does, but is none of the classes that the reader knows."""

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return super().lookup_tensor(index)


def load(path: Path, into: dict[str, torch.Tensor], reader: Any, planner: Any = None) -> None:
    dcp.load(into, storage_reader=reader, planner=planner, no_dist=True)


@pytest.mark.parametrize("planner", [BcpLoadPlanner, DefaultLoadPlanner, OwnNamesPlanner])
@pytest.mark.parametrize("root", ROOTS, ids=str)
def test_views_of_one_tensor_hold_what_stock_dcp_leaves_there(root: Path, planner: Any) -> None:
    """Views are whole, rows, columns, of other shapes and strides; what was stored differs under each key."""
    draw = random.Random(27)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        for round_ in range(15):
            path = Path(folder, str(round_))

            def views(base: torch.Tensor, seed: int = round_) -> dict[str, torch.Tensor]:
                draw = random.Random(seed)
                makers = [
                    lambda: base,
                    lambda: base.view(-1),
                    lambda: base.t(),
                    lambda: base[draw.randrange(30) :],
                    lambda: base[:, draw.randrange(20) :],
                    lambda: base[:: draw.randint(1, 3), draw.randrange(20) :: 2],
                    lambda: torch.zeros(5),
                ]
                return {f"key{k}": draw.choice(makers)() for k in range(draw.randint(2, 6))}

            wanted, got = torch.zeros(40, 30), torch.zeros(40, 30)
            saved = [(key, torch.randn(view.shape)) for key, view in views(wanted).items()]
            draw.shuffle(saved)
            dcp.save(dict(saved), storage_writer=BcpWriter(path), no_dist=True)
            load(path, views(wanted), dcp.FileSystemReader(path))
            load(path, views(got), BcpReader(path, config=THREADS), planner())
            assert torch.equal(got, wanted), f"round {round_}"


@pytest.mark.parametrize("root", ROOTS, ids=str)
def test_large_tied_tensors_are_no_mixture(root: Path) -> None:
    """Of several slots each, which threads read at the same time; the key that counts was stored first."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        path = Path(folder, "ck")
        values = {key: torch.full((20 << 20,), number, dtype=torch.uint8) for number, key in enumerate("cba")}
        dcp.save(values, storage_writer=BcpWriter(path), no_dist=True)
        tied = torch.full((20 << 20,), 9, dtype=torch.uint8)
        version = tied._version
        load(path, dict.fromkeys("abc", tied), BcpReader(path, config=THREADS), BcpLoadPlanner())
        assert torch.equal(tied, values["c"])
        assert tied._version > version


def test_a_tied_tensor_that_is_cast_counts_in_its_turn(tmp_path: Path) -> None:
    """A cast goes through a copy, behind what is filled in place."""
    values = {"a": torch.randn(8, 8), "b": torch.randn(8, 8, dtype=torch.float64), "c": torch.randn(8, 8)}
    dcp.save(values, storage_writer=BcpWriter(tmp_path / "ck"), no_dist=True)
    tied = torch.zeros(8, 8)
    for keys, counts in (("ab", "b"), ("bc", "c"), ("abc", "c")):
        with pytest.warns(RuntimeWarning, match="'b' is float64"):
            load(tmp_path / "ck", dict.fromkeys(keys, tied), BcpReader(tmp_path / "ck"))
        assert torch.equal(tied, values[counts].float()), keys

# SPDX-License-Identifier: Apache-2.0
"""``Pad``: a vocabulary with rows to spare, in loads, reads, conversions and other transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import assert_equal

from bytecheckpoint import Config, LoadSpec, digest, load_state_dict, read, save_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import ConfigError, ShapeMismatchError
from bytecheckpoint.transforms import Concat, Pad, Slice, Transpose

EMBED = torch.arange(1.0, 31.0).reshape(10, 3)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    save_state_dict(tmp_path / "ckpt", {"embed": EMBED, "n": torch.ones(2)}, no_dist=True)
    return tmp_path / "ckpt"


def padded(fill: float = 0.0, rows: int = 16) -> torch.Tensor:
    out = torch.full((rows, 3), fill)
    out[:10] = EMBED
    return out


@pytest.mark.parametrize("pad", [Pad("embed", size=16), Pad("embed", multiple=8), Pad("emb{x}", to="emb{x}", size=16)])
def test_a_load_leaves_new_rows_as_they_are(ckpt: Path, pad: Pad) -> None:
    state = {"embed": torch.full((16, 3), -7.0), "n": torch.zeros(2)}
    load_state_dict(ckpt, state, no_dist=True, spec=LoadSpec(transforms=[pad]))
    assert_equal(state, {"embed": padded(-7.0), "n": torch.ones(2)})


def test_reads_and_conversions_have_zeros(ckpt: Path, tmp_path: Path) -> None:
    spec = LoadSpec(transforms=[Pad("embed", size=16)])
    assert_equal(dict(read(ckpt, spec=spec)), {"embed": padded(), "n": torch.ones(2)})
    for to in ("bcp", "dcp", "safetensors", "torch"):
        convert(ckpt, tmp_path / to, to=to, spec=spec, verify=True, shard_size=100)  # type: ignore[arg-type]
        got = torch.load(tmp_path / to, weights_only=True) if to == "torch" else read(tmp_path / to)
        assert_equal(dict(got), {"embed": padded(), "n": torch.ones(2)})
    assert digest(ckpt, spec=spec).total == digest(tmp_path / "bcp").total


def test_a_large_tensor_is_not_mapped(tmp_path: Path) -> None:
    """Its memory would be that of the file, which does not have the rows."""
    save_state_dict(tmp_path, {"w": torch.ones(1000, 1000)}, no_dist=True)
    got = read(tmp_path, spec=LoadSpec(transforms=[Pad("w", size=1024)]))["w"]
    assert got.shape == (1024, 1000)
    assert got[:1000].eq(1).all()
    assert got[1000:].eq(0).all()


def test_with_other_transforms(ckpt: Path) -> None:
    spec = LoadSpec(
        include="embed",
        transforms=[Pad("embed", size=12), Transpose("embed"), Concat(["embed", "embed"], "twice", dim=1)],
    )
    wanted = torch.cat([padded(rows=12).T, padded(rows=12).T], dim=1)
    assert_equal(read(ckpt, spec=spec)["twice"], wanted)
    state = {"twice": torch.zeros(3, 24)}
    load_state_dict(ckpt, state, no_dist=True, spec=spec)
    assert_equal(state["twice"], wanted)
    only_new = LoadSpec(include="embed", transforms=[Pad("embed", size=16), Slice("embed", begin=12)])
    assert_equal(read(ckpt, spec=only_new)["embed"], torch.zeros(4, 3))
    back = LoadSpec(include="embed", transforms=[Pad("embed", size=16), Slice("embed", end=10), Pad("embed", size=10)])
    assert_equal(read(ckpt, spec=back)["embed"], EMBED)


def test_the_state_has_the_padded_shape(ckpt: Path) -> None:
    spec = LoadSpec(transforms=[Pad("embed", size=16)])
    with pytest.raises(ShapeMismatchError, match=r"embed"):
        load_state_dict(ckpt, {"embed": torch.zeros(15, 3), "n": torch.zeros(2)}, no_dist=True, spec=spec)


@pytest.mark.parametrize(
    "wrong", [{}, {"size": 4, "multiple": 2}, {"size": 0}, {"multiple": True}, {"size": 2.5}, {"size": 1 << 70}]
)
def test_arguments_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pass size or multiple"):
        Pad("embed", **wrong)


def test_what_is_refused(ckpt: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dim 0 has 10, more than size=4: Slice"):
        read(ckpt, spec=LoadSpec(transforms=[Pad("embed", size=4)]))
    with pytest.raises(ConfigError, match="cannot be inverted"):
        LoadSpec(transforms=[Pad("embed", size=16)]).inverted()
    # What a tensor lacks would not be told from padding.
    from bytecheckpoint.tensors.chunks import LocalChunks

    part = LocalChunks((8, 3), [(0, 0)], [torch.ones(4, 3)], torch.float32)
    save_state_dict(tmp_path / "part", {"w": part}, no_dist=True, config=Config(allow_partial_tensors=True))
    with pytest.raises(ConfigError, match="of what is to be padded, rows 4 to 7"):
        read(tmp_path / "part", spec=LoadSpec(transforms=[Pad("w", size=16)]))


def test_in_a_file(ckpt: Path, tmp_path: Path) -> None:
    spec = LoadSpec(transforms=[Pad("embed", dim=0, multiple=64)])
    spec.to_file(tmp_path / "spec.toml")
    assert LoadSpec.from_file(tmp_path / "spec.toml") == spec
    assert read(ckpt, spec=LoadSpec.from_file(tmp_path / "spec.toml"))["embed"].shape == (64, 3)

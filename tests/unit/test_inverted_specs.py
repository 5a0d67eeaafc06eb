# SPDX-License-Identifier: Apache-2.0
"""``LoadSpec.inverted``: the way back gives what was there, to the bit; what has no way back is refused by its key."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.campaign import Campaign
from support.drawn_transforms import draw_spec

from bytecheckpoint import LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.errors import ConfigError, KeyMismatchError
from bytecheckpoint.transforms import (
    Concat,
    Dequantize,
    DequantizeMXFP4,
    Permute,
    Rename,
    Reshape,
    Slice,
    Split,
    Stack,
    Transform,
    Transpose,
    Unstack,
)


def loaded(path: Path, like: Mapping[str, Any], spec: LoadSpec) -> dict[str, Any]:
    state = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in like.items()}
    load_state_dict(path, state, no_dist=True, spec=spec)
    return state


def assert_same(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value, key


def assert_goes_back(tmp_path: Path, spec: LoadSpec, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    save_state_dict(tmp_path / "before", dict(before), no_dist=True)
    assert_same(loaded(tmp_path / "before", after, spec), after)
    save_state_dict(tmp_path / "after", dict(after), no_dist=True)
    assert_same(loaded(tmp_path / "after", before, spec.inverted()), before)
    assert_same(loaded(tmp_path / "before", after, spec.inverted().inverted()), after)


def test_renames_beside_transforms(tmp_path: Path) -> None:
    q, k, v = torch.randn(8, 4), torch.randn(2, 4), torch.randn(2, 4)
    experts, embed = torch.randn(3, 5, 6), torch.randn(4, 4)
    before = {"model.l.0.q": q, "model.l.0.k": k, "model.l.0.v": v, "model.embed": embed, "step": 7}
    before |= {f"model.l.1.e.{i}.w": expert for i, expert in enumerate(experts)}
    spec = LoadSpec(
        transforms=[
            Reshape("model.l.{l}.q", shape=[2, 2, 2, 4], source_shape=[8, -1]),
            Transpose("model.l.{l}.q", dim0=1, dim1=2),
            Reshape("model.l.{l}.q", shape=[8, -1], source_shape=[2, 2, 2, 4]),
            Concat(["model.l.{l}.q", "model.l.{l}.k", "model.l.{l}.v"], "model.l.{l}.qkv", sizes=[8, 2, 2]),
            Stack("model.l.{l}.e.{i}.w", "model.l.{l}.experts"),
        ],
        rename={"model.l.{l}": "layers.{l}", "model": "", "step": "counter"},
    )
    turned = q.reshape(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)
    after = {"layers.0.qkv": torch.cat([turned, k, v]), "layers.1.experts": experts, "embed": embed, "counter": 7}
    assert_goes_back(tmp_path, spec, before, after)


def test_names_are_exchanged(tmp_path: Path) -> None:
    before = {"a": torch.ones(2, 3), "b": torch.zeros(4), "c.d": 3}
    after = {"b": torch.ones(3, 2), "a": torch.zeros(4), "c.d": 3}
    assert_goes_back(tmp_path, LoadSpec(transforms=[Transpose("a")], rename={"a": "b", "b": "a"}), before, after)


def test_a_rule_that_says_more_goes_first_on_the_way_back(tmp_path: Path) -> None:
    spec = LoadSpec(rename={"h.attn.q": "l.attention.wq", "h.{part}": "l.{part}", "h": "l", "": "x"})
    assert [*spec.inverted().rename] == ["l.attention.wq", "l.{part}", "l", "x"]
    before = {"h.attn.q.w": torch.ones(1), "h.mlp.w": torch.ones(2), "other": torch.ones(3)}
    after = {"l.attention.wq.w": torch.ones(1), "l.mlp.w": torch.ones(2), "x.other": torch.ones(3)}
    spec = LoadSpec(rename={"h.attn.q": "l.attention.wq", "h": "l", "": "x"})
    assert_goes_back(tmp_path, spec, before, after)


def test_a_rename_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text('[[transforms]]\nkind = "rename"\n[transforms.rules]\na = "b"\n')
    assert LoadSpec.from_file(file) == LoadSpec(transforms=[Rename({"a": "b"})])
    assert LoadSpec.from_file(file).inverted() == LoadSpec(rename={"b": "a"})


def test_a_file_that_was_written_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    for number in range(20):
        spec = draw_spec(random.Random(number)).spec
        for each in (spec, LoadSpec(include=["a.*", 'q"\x7f\n\\'], exclude="b", strict=False, rename={"": "x"})):
            each.to_file(file)
            assert LoadSpec.from_file(file) == each
    LoadSpec(cast={"*.bias": torch.float32}).to_file(file)
    assert LoadSpec.from_file(file) == LoadSpec(cast={"*.bias": "float32"})

    class Own(Transform):
        pass

    for wrong, path in ((LoadSpec(transforms=[Own()]), file), (LoadSpec(), tmp_path / "absent" / "spec.toml")):
        with pytest.raises(ConfigError, match=r"spec\.toml"):
            wrong.to_file(path)


def test_names_between_transforms_are_in_the_report(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "a", {"a": torch.ones(2, 3), "b": torch.ones(1), "n": 3}, no_dist=True)
    state = {"y": torch.zeros(3, 2), "z": torch.zeros(1), "m": 0}
    spec = LoadSpec(transforms=[Rename({"a": "x", "b": "z", "n": "m"}), Transpose("x")], rename={"x": "y"})
    report = load_state_dict(tmp_path / "a", state, no_dist=True, spec=spec)
    assert {*report.renamed_keys} == {("x", "y"), ("b", "z"), ("n", "m")}
    assert state["m"] == 3
    for rules, why in (({"q": "r"}, "'q' matches no key"), ({"a": "b"}, "two sources for one key: 'b' of 'a' and 'b'")):
        with pytest.raises((ConfigError, KeyMismatchError), match=why):
            load_state_dict(tmp_path / "a", state, no_dist=True, spec=LoadSpec(transforms=[Rename(rules)]))


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (Slice("embed", begin=1), "what it leaves out of 'embed'"),
        (Dequantize("*.w", scale="*.s"), r"nothing here quantizes '\*\.w'"),
        (DequantizeMXFP4("a_blocks", scales="a_scales", to="a"), "nothing here quantizes 'a_blocks'"),
        (Concat(["q", "k"], "qk"), "how large each part of 'qk' is"),
        (Concat(["q", "q"], "qq", sizes="alike"), "one name stands twice"),
        (Concat(["l.{i}.q", "l.{i}.k"], "qk", sizes="alike"), r"'qk' does not say what \{i\} was"),
        (Reshape("l.{i}.w", shape=[3, -1]), r"what shape 'l\.\{i\}\.w' had"),
        (Transpose("*.kernel", to="kernel"), r"'\*\.kernel' has wildcards"),
        (Stack("*.{i}.w", "w"), r"'\*\.\{i\}\.w' has wildcards"),
        (Rename({"re:(a)": "b"}), "without wildcards"),
        (Rename({"a*": "b"}), "without wildcards"),
        (Rename({"h.{i}.w": "w"}), r"'w' does not say what \{i\} was"),
        (Rename({"a": "c", "b": "c"}), r"LoadSpec\(rename=\{'b': 'c'\}\): .*'a' gets the same name"),
        (Rename({"a": "b[0]"}), r"'b\[0\]' would be a pattern"),
    ],
)
def test_what_has_no_way_back(transform: Transform, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LoadSpec(transforms=[Transpose("w"), transform]).inverted()
    if isinstance(transform, Rename):
        with pytest.raises(ConfigError, match=why):
            LoadSpec(rename=transform.rules).inverted()


def test_sizes_and_shapes_that_are_said_are_compared(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "a", {"q": torch.ones(4, 2), "k": torch.ones(2, 2)}, no_dist=True)
    for transform, why in (
        (Concat(["q", "k"], "qk", sizes=[3, 3]), r"'q': sizes \[4, 2\] along dim 0, but sizes=\[3, 3\]"),
        (Concat(["q", "k"], "qk", sizes="alike"), r"'q': sizes \[4, 2\] along dim 0, but sizes='alike'"),
        (Reshape("q", shape=[8], source_shape=[2, -1]), r"'q': it has shape \[4, 2\], but source_shape=\[2, -1\]"),
        (Reshape("q", shape=[8], source_shape=[3, -1]), r"'q': it has shape \[4, 2\], but source_shape=\[3, -1\]"),
    ):
        state = {"qk": torch.zeros(6, 2), "q": torch.zeros(8)}
        with pytest.raises(ConfigError, match=why):
            load_state_dict(tmp_path / "a", state, no_dist=True, spec=LoadSpec(strict=False, transforms=[transform]))
    for wrong in ({"sizes": "equal"}, {"sizes": [1]}):
        with pytest.raises(ConfigError, match="size"):
            Concat(["q", "k"], "qk", **wrong)


def test_dims_that_are_counted_from_the_end(tmp_path: Path) -> None:
    value, parts = torch.randn(2, 3, 4), torch.randn(5, 10, 3)
    before = {"p": value, "u": parts}
    split = Split("u.0", ["a", "b"], sizes=[4, 6], dim=-1)
    spec = LoadSpec(transforms=[Permute("p", dims=[-1, 0, -2]), Unstack("u", "u.{i}", dim=-1), split])
    first, *others = parts.unbind(-1)
    after = {"p": value.permute(2, 0, 1), "a": first[:, :4], "b": first[:, 4:], "u.1": others[0], "u.2": others[1]}
    after = {key: each.contiguous() for key, each in after.items()}
    assert_goes_back(tmp_path, spec, before, after)


def test_at_random(tmp_path: Path) -> None:
    campaign = Campaign("specs and their way back")

    def trial(number: int, draw: random.Random) -> None:
        drawing = draw_spec(draw, is_invertible=True)
        try:
            assert_goes_back(tmp_path / str(number), drawing.spec, drawing.stored, drawing.wanted)
        except BaseException as error:
            error.add_note(f"{drawing.spec}")
            raise
        campaign.covered.update(drawing.kinds)

    campaign.run(trial, short=15, long=500)
    print(campaign)
    assert {"Rename", "Concat", "Split", "Reshape", "Stack", "Unstack"} <= campaign.covered.keys()

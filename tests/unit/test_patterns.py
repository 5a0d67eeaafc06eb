# SPDX-License-Identifier: Apache-2.0
"""Patterns and rules of a LoadSpec, on names alone."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.load_spec.patterns import filled, matches, renamed, template_names, whole_name

MATCHES = {
    "model": ["model", "model.a", "model.a.b"],
    "model.*": ["model.a", "model.a.b"],
    "*.weight": ["a.weight", "a.b.weight", "a.weight.x"],
    "layers.{i}.w": ["layers.0.w", "layers.x.w.below"],
    "{a}.{a}": ["x.x", "x.x.y"],
    "layer?": ["layer1", "layer1.w"],
    "layer[01]": ["layer0", "layer1.w"],
    "layer[!0]": ["layer1"],
    "a+b(c)": ["a+b(c)", "a+b(c).d"],
    r"re:^h\.\d+\.w$": ["h.12.w"],
    "": ["", "anything.at.all"],
}
MATCHES_NOT = {
    "model": ["models", "a.model", "mode"],
    "model.*": ["model", "modelx"],
    "*.weight": ["weight", "a.weights"],
    "layers.{i}.w": ["layers.0.1.w", "layers..w"],
    "{a}.{a}": ["x.y"],
    "layer?": ["layer", "layer12"],
    "layer[01]": ["layer2"],
    "layer[!0]": ["layer0"],
    "a+b(c)": ["aab(c)"],
    r"re:^h\.\d+\.w$": ["h.12.w.x", "xh.1.w"],
}


@pytest.mark.parametrize(("pattern", "name"), [(p, name) for p, names in MATCHES.items() for name in names])
def test_it_matches(pattern: str, name: str) -> None:
    assert matches(pattern, name)


@pytest.mark.parametrize(("pattern", "name"), [(p, name) for p, names in MATCHES_NOT.items() for name in names])
def test_it_does_not_match(pattern: str, name: str) -> None:
    assert not matches(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "to", "name", "new"),
    [
        ("model", "net", "model", "net"),
        ("model", "net", "model.a.b", "net.a.b"),
        ("model", "", "model.a", "a"),
        ("", "model", "a.b", "model.a.b"),
        ("", "", "a.b", "a.b"),
        ("h.{i}.attn", "layers.{i}.self_attn", "h.3.attn.q.weight", "layers.3.self_attn.q.weight"),
        ("{a}.{b}", "{b}.{a}", "x.y.z", "y.x.z"),
        (r"re:(.*)\.kernel", r"\1.weight", "a.b.kernel", "a.b.weight"),
        (r"re:(?P<x>\w+)\.w", r"w.\g<x>", "a.w", "w.a"),
        ("model", "net", "other.model", None),
    ],
)
def test_it_renames(pattern: str, to: str, name: str, new: str | None) -> None:
    assert renamed(pattern, to, name) == new


@pytest.mark.parametrize("pattern", ["re:(", "{not a name}", "{}", "{a-b}"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        matches(pattern, "x")


def test_a_rule_must_know_what_it_puts_in() -> None:
    with pytest.raises(ConfigError, match=r"\{j\}"):
        renamed("a.{i}", "b.{j}", "a.1")
    with pytest.raises(ConfigError, match="rename"):
        renamed("re:(a)", r"\2", "a")


def test_templates_are_for_whole_names() -> None:
    assert template_names("{a}.x.{b}.{a}") == ["a", "b"]
    assert whole_name("e.{i}.w").fullmatch("e.1.w.x") is None
    assert filled("e.{i}.w", {"i": "7"}) == "e.7.w"

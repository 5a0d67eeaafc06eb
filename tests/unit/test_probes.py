# SPDX-License-Identifier: Apache-2.0
"""Tests probes: each notices when what it checks has changed, and then refuses what relies on it, and nothing else."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.without_probes import FAULT, FEATURES_OF

from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.probes import probe
from bytecheckpoint.probes.of_torch import TORCH_FEATURES
from bytecheckpoint.probes.probe import Feature, Probe, find, holds, release, require, warn_of_fallbacks

LIMIT_S = 300.0
PROBES = [one for feature in TORCH_FEATURES for one in feature.probes]


@pytest.fixture(autouse=True)
def _looked_at_anew() -> Iterator[None]:
    yield
    for cached in (probe._known_faults, probe._warn_if_newer, warn_of_fallbacks):
        cached.cache_clear()


@pytest.mark.parametrize("one", PROBES, ids=lambda one: one.path)
def test_all_hold_and_what_is_gone_or_otherwise_is_seen(one: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one.fault() == ""
    module, _, names = one.path.partition(":")
    *outer, last = names.split(".")
    home: Any = importlib.import_module(module)
    for name in outer:
        home = getattr(home, name)
    monkeypatch.setattr(home, last, types.SimpleNamespace(__code__=None) if one.has else lambda: None)
    has_conditions = one.takes or one.uses or one.variables or one.calls or one.has or one.text
    assert bool(one.fault()) == bool(has_conditions)
    monkeypatch.delattr(home, last)
    if one.path != "torch.ops:aten":  # torch makes this one when it is asked for
        assert one.fault()


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Makes a module with something of each kind, and returns it."""
    made = types.ModuleType("another_package")
    source = """
KEY = "_key"
def flow(reader, planner, more=None):
    plan = planner.make(helper)
    def step():
        plan.finish()
        return reader.read(plan)
    return step
class Thing:
    declared: int
    def __init__(self):
        self.set_here = 1
"""
    exec(source, vars(made))
    monkeypatch.setitem(sys.modules, "another_package", made)
    monkeypatch.setitem(probe.TESTED, "another_package", ("another-package", "1.0", "1.2"))
    monkeypatch.setattr(probe, "version", lambda name: "1.2.9")
    monkeypatch.setattr(probe, "find_spec", lambda name: made)
    return made


@pytest.mark.parametrize(
    ("conditions", "fault"),
    [
        ({"takes": ("reader", "more")}, ""),
        ({"takes": ("reader", "less")}, "it does not take less"),
        ({"takes": ("reader", "planner", "more"), "takes_no_more": True}, ""),
        ({"takes": ("reader", "planner"), "takes_no_more": True}, "it takes reader, planner, more instead of "),
        ({"uses": ("helper",)}, ""),
        ({"uses": ("helper", "other")}, "its code does not use other"),
        ({"variables": ("reader", "plan", "step")}, ""),
        ({"variables": ("result",)}, "its code does not have the variable result"),
        ({"calls": ("finish", "read")}, ""),
        ({"calls": ("read", "finish")}, "its code does not call read, then finish"),
    ],
)
def test_conditions_of_functions(other: types.ModuleType, conditions: dict[str, Any], fault: str) -> None:
    said = Probe("another_package:flow", "It flows.", **conditions).fault()
    assert said.startswith(fault)
    assert bool(said) == bool(fault)


def test_conditions_of_classes_and_texts(other: types.ModuleType) -> None:
    assert Probe("another_package:Thing", "", has=("declared", "set_here", "__init__")).fault() == ""
    assert Probe("another_package:Thing", "", has=("declared", "never")).fault() == "it has no never"
    assert Probe("another_package:KEY", "", text="_key").fault() == ""
    assert Probe("another_package:KEY", "", text="_other").fault() == "it is '_key' instead of '_other'"
    assert Probe("another_package.inner:x", "").fault().startswith("it cannot be imported: ModuleNotFoundError")
    assert (find("another_package:KEY"), find("another_package:NO", 3), find("no_package:x")) == ("_key", 3, None)
    assert Probe("another_package._a:_b", "", uses=("_c", "d"), has=("__e",)).private_names() == {"_a", "_b", "_c"}


def test_a_refusal_names_feature_version_probe_and_advice(other: types.ModuleType) -> None:
    missing = Probe("another_package:missing", "It is missed.")
    feature = Feature("the feature", "Do without.", (missing, Probe("another_package:flow", "It flows.")))
    with pytest.raises(UnsupportedError) as refused:
        require(feature)
    assert str(refused.value) == (
        "the feature cannot work with another-package 1.2.9: probe another_package:missing: there is no missing (It is "
        "missed). Do without. bcp doctor lists all probes"
    )


def test_a_fallback_is_no_refusal(other: types.ModuleType) -> None:
    feature = Feature("the feature", "", (Probe("another_package:missing", "It is missed.", fallback="it is slower"),))
    require(feature)
    assert not holds(feature)
    with pytest.warns(RuntimeWarning, match=r"missing \(It is missed\): it is slower"):
        warn_of_fallbacks(feature)


@pytest.mark.parametrize(
    ("installed", "is_newer"),
    [("1.0.0", False), ("1.2.9", False), ("1.2", False), ("1.3.0.dev20261101+cu132", True), ("2.0rc1", True)],
)
def test_a_newer_version_is_one_warning(
    other: types.ModuleType, monkeypatch: pytest.MonkeyPatch, installed: str, is_newer: bool
) -> None:
    monkeypatch.setattr(probe, "version", lambda name: installed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for name in ("one", "another"):
            require(Feature(name, "", (Probe("another_package:flow", "It flows."),)))
    told = [str(each.message) for each in warned]
    assert [f"another-package {installed} is newer than 1.2" in text for text in told] == [True] * is_newer


def test_release_reads_the_numbers() -> None:
    assert release("2.15.0+cu132") == (2, 15, 0)
    assert release("2.16.0.dev20261101") == (2, 16, 0)
    assert release("3.0rc1") == (3,)
    assert release("") == ()


def test_without_each_probe_the_rest_goes_on_working(tmp_path: Path) -> None:
    """Breaks the probes of torch itself, one after the other."""
    script = Path(__file__).with_name("without_probes.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == {one.path for one in PROBES}
    wrong = []
    for path, of_uses in said.items():
        for use, text in of_uses.items():
            needed = [one for feature in FEATURES_OF[use] for one in feature.probes if one.path == path]
            is_refused = any(not one.fallback and not one.is_lazy for one in needed)
            names_it = "UnsupportedError" in text and f"probe {path}: {FAULT}" in text
            if names_it != is_refused or (text and not names_it):
                wrong.append(f"without {path}: {use}: {text or 'works'}")
    assert not wrong, "\n".join(wrong)

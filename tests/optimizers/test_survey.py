# SPDX-License-Identifier: Apache-2.0
"""The state of every optimizer of the short form comes back, or is refused, or torch loses it without us, too.

With BCP_LONG=1 (``make torture``, which installs the packages). ``python tests/optimizers/survey.py`` prints tables of
all that is installed, as docs/internals/optimizers.md has them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.campaign import IS_LONG

from optimizers.exact import described, difference
from optimizers.packages import MODULES, SHORT, short_names
from optimizers.survey import forked_with_packages, survey
from optimizers.tables import faults, report
from optimizers.trials import FRESH, SAME, ZEROS, Attempt, Trial
from optimizers.verdicts import verdict
from optimizers.ways import LIVE, OWN, TORCH

# They do not step on a CPU, or are no optimizers by themselves.
CANNOT_STEP = {"torchao.optim:CPUOffloadOptimizer"}


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.split(".")[0]) is not None


@pytest.fixture(scope="module", autouse=True)
def ranks_with_packages() -> Iterator[None]:
    """Forks the ranks from a process that has imported the packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling a step takes longer than everything else
        with forked_with_packages([module for module in SHORT if IS_LONG and is_installed(module)]):
            yield


@pytest.mark.parametrize("module", SHORT)
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_states_come_back(module: str) -> None:
    if not is_installed(module):
        pytest.skip(f"{MODULES[module]} is not installed: make .venv/.optimizers installs it")
    plain, sharded = zip(*survey(short_names(module)), strict=True)
    in_both = [*plain, *(trial for trial in sharded if trial)]
    assert {trial.name: trial.unusable for trial in plain if trial.unusable and trial.name not in CANNOT_STEP} == {}
    assert faults(in_both) == []
    print(report(plain, [trial for trial in sharded if trial]))


def test_of_one_optimizer() -> None:
    ((plain, sharded),) = survey(["torch.optim:AdamW"])
    assert sharded is not None
    for trial in (plain, sharded):
        assert trial.unusable == ""
        assert [verdict(trial, way).text for way in (LIVE, OWN, TORCH)] == [SAME] * 3
    assert "| torch.optim: AdamW | bit for bit | bit for bit | bit for bit |" in report([plain], [sharded])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": torch.zeros(2, 3)}, ""),
        ({"a": torch.zeros(3, 2).t()}, r".a.strides is \(1, 2\) and was \(3, 1\)"),
        ({"a": torch.zeros(2, 3, dtype=torch.float64)}, ".a.dtype is torch.float64"),
        ({"a": torch.full((2, 3), -0.0)}, ".a.elements has other values"),
        ({"a": torch.nn.Parameter(torch.zeros(2, 3))}, ".a.class is Parameter"),
        ({"a": 0}, ".a is"),
        ({}, ".a is missing"),
        ({"a": torch.zeros(2, 3), 1: 2}, ".int 1 is too much"),
    ],
)
def test_differences(other: dict[Any, Any], said: str) -> None:
    found = difference(described(other), described({"a": torch.zeros(2, 3)}))
    assert re.match(said, found) if said else not found, found


def of(way: str, ours: dict[str, Attempt], control: dict[str, Attempt], **trial: Any) -> Trial:
    return Trial("m:A", attempts={way: ours}, stock={way: control}, **trial)


SAME_AGAIN = Attempt("same", SAME)
DIFFERS = Attempt("differs", ".optimizer is other")


def test_whose_fault_it_is() -> None:
    assert verdict(of(OWN, {ZEROS: SAME_AGAIN}, {}), OWN).text == SAME
    assert verdict(of(TORCH, {FRESH: DIFFERS}, {FRESH: SAME_AGAIN}), TORCH).is_fault
    assert verdict(of(LIVE, {FRESH: SAME_AGAIN, ZEROS: DIFFERS}, {FRESH: SAME_AGAIN}), LIVE).is_fault
    assert verdict(of(TORCH, {FRESH: Attempt("raised", "KeyError: 1")}, {FRESH: SAME_AGAIN}), TORCH).is_fault
    of_torch = verdict(of(TORCH, {FRESH: DIFFERS, ZEROS: SAME_AGAIN}, {FRESH: DIFFERS}), TORCH)
    assert (of_torch.text, of_torch.is_fault) == (
        "bit for bit after a step of zeros, else lost with stock DCP, too",
        False,
    )
    own = of(OWN, {ZEROS: DIFFERS}, {ZEROS: DIFFERS})
    own.stock[LIVE] = {FRESH: SAME_AGAIN}
    assert verdict(own, OWN).is_fault
    warned = of(OWN, {ZEROS: Attempt("differs", ".a is missing", "only a part of")}, {ZEROS: DIFFERS})
    assert verdict(warned, OWN).text == "lost with stock DCP, too, and we warn"
    refused = Attempt("refused", "UnsupportedError: A keeps state under 'b', which is not a parameter")
    assert verdict(of(LIVE, {"save": refused}, {}), LIVE).text == "refused (state of no parameter)"
    for said in (set(), {LIVE}):
        ranks = of(LIVE, {FRESH: DIFFERS}, {FRESH: SAME_AGAIN}, is_alike=False, warned=said)
        assert verdict(ranks, LIVE).is_fault == (not said)

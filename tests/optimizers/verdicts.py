# SPDX-License-Identifier: Apache-2.0
"""What the attempts of a trial mean in one phrase, and whose fault it is if a state did not come back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from optimizers.trials import FRESH, SAME, TRAINED, TRUSTED, ZEROS, Attempt, Trial
from optimizers.ways import LIVE, OWN

__all__ = ["Verdict", "verdict"]

# What our errors say, in short.
_REASONS = (
    ("which is not a parameter", "state of no parameter"),
    ("must be a str|has the key .* which would come back", "keys that are not text"),
    ("by the parts of a tensor subclass", "no tensors to fill"),
    ("to be loaded into one of", "a tensor of another shape"),
    ("a value of type NoneType", "a tensor where the target has None"),
    ("is not plain data", "objects of its own classes"),
    ("not in train mode", "it is not in train mode"),
    ("'NoneType' object is not callable", "its step needs a closure"),
    ("is not by parameter", "entries of its own"),
    ("shards of a DTensor cannot be read", "Partial DTensors"),
    ("is an empty dict", "an empty dict"),
    ("is a tuple", "tensors in a tuple"),
)
_NEEDS = {FRESH: "", ZEROS: " after a step of zeros", TRAINED: " after a step of training"}


@dataclass(frozen=True)
class Verdict:
    """A phrase, and whether we are at fault."""

    text: str
    is_fault: bool = False


def verdict(trial: Trial, way: str) -> Verdict:
    """Judges one way of a trial.

    We are at fault where a state differs without a warning, or something is raised that is no error of ours, although
    the control came back from the same.
    """
    attempts = trial.attempts[way]
    for into, attempt in attempts.items():
        if attempt.kind in ("same", "refused", "no target") or attempt.warning:
            continue
        # Stock DCP puts plain values under keys of text, so its state_dict() of an optimizer differs more than ours.
        is_copy_enough = way == OWN and attempt.kind != "raised"
        control = trial.stock.get(LIVE if is_copy_enough else way, {})
        of_control = control.get(into.removesuffix(TRUSTED))
        if of_control is not None and of_control.kind not in ("same", "refused"):
            continue
        if attempt.kind != "raised" and (not trial.is_alike or way in trial.warned):
            return _of_one_rank(trial, way)
        return Verdict(f"DIFFERS ({into}): {attempt.outcome}", is_fault=True)
    came_back = next((into for into, attempt in attempts.items() if attempt.kind == "same"), None)
    if came_back is None and way in trial.warned:
        return _of_one_rank(trial, way)
    if came_back is None:
        return Verdict(_failure(attempts))
    text = SAME if trial.is_repeatable else f"{SAME}; its steps are not repeatable"
    into = came_back.removesuffix(TRUSTED)
    needed = "" if into == ZEROS and way == OWN else _NEEDS[into]
    if not needed and into == came_back:
        return Verdict(text)
    with_pickle = TRUSTED.replace(",", "") * came_back.endswith(TRUSTED)
    return Verdict(f"{text}{with_pickle}{needed}, else {_said(next(iter(attempts.values())))}")


def _of_one_rank(trial: Trial, way: str) -> Verdict:
    is_said = way in trial.warned
    return Verdict(f"ranks differ: all get values of one{', and we warn' if is_said else ''}", is_fault=not is_said)


def _failure(attempts: Mapping[str, Attempt]) -> str:
    kinds = [attempt for attempt in attempts.values() if attempt.kind != "no target"] or [*attempts.values()]
    return _said(kinds[-1])


def _said(attempt: Attempt) -> str:
    name = attempt.outcome.split(":")[0]
    reason = next((short for pattern, short in _REASONS if re.search(pattern, attempt.outcome)), "")
    match attempt.kind:
        case "refused":
            return f"refused ({reason or attempt.outcome})"
        case "no target":
            return f"it cannot make that step ({reason or name})"
        case "raised":
            return f"stock DCP raises {name}, too" + f" ({reason})" * bool(reason)
        case "changed by the save":
            return "torch changes the optimizer that it saves"
        case "next step":
            return "its next step differs: it keeps state elsewhere"
    return f"lost with stock DCP, too{', and we warn' if attempt.warning else ''}"

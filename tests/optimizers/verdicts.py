# SPDX-License-Identifier: Apache-2.0
"""What the attempts of a trial mean in one phrase, and whose fault it is if a state did not come back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from optimizers.trials import FRESH, SAME, TRAINED, ZEROS, Attempt, Trial
from optimizers.ways import OWN

__all__ = ["Verdict", "verdict"]

# What our errors say, in short.
_REASONS = (
    ("which is not a parameter", "state of no parameter"),
    ("must be a str|has the key .* which would come back", "keys that are not text"),
    ("by the parts of a tensor subclass", "no tensors to fill"),
    ("a value of type NoneType", "a tensor where the target has None"),
    ("is an empty dict", "an empty dict"),
    ("is a tuple", "tensors in a tuple"),
)
_OF_ONE_RANK = "its ranks differ: all get the values of one"
_NEEDS = {ZEROS: "after a step of zeros", TRAINED: "after a step of training"}


@dataclass(frozen=True)
class Verdict:
    """A phrase, and whether we are at fault."""

    text: str
    is_fault: bool = False


def verdict(trial: Trial, way: str) -> Verdict:
    """Judges one way of a trial.

    We are at fault where a state differs, or something is raised that is no error of ours, although the control came
    back from the same.
    """
    attempts, control = trial.attempts[way], trial.stock.get(way, {})
    for into, attempt in attempts.items():
        if attempt.kind in ("same", "refused", "no target"):
            continue
        if into in control and control[into].kind not in ("same", "refused"):
            continue
        if attempt.kind != "raised" and not trial.is_alike:
            return Verdict(_OF_ONE_RANK)
        return Verdict(f"DIFFERS ({into}): {attempt.outcome}", is_fault=True)
    came_back = next((into for into, attempt in attempts.items() if attempt.kind == "same"), None)
    if came_back is None and not trial.is_alike:
        return Verdict(_OF_ONE_RANK)
    if came_back is None:
        return Verdict(_failure(attempts))
    text = SAME if trial.is_repeatable else f"{SAME}; its steps are not repeatable"
    if came_back == FRESH or (came_back == ZEROS and way == OWN):
        return Verdict(text)
    return Verdict(f"{text} {_NEEDS[came_back]}, {_before(attempts)}")


def _before(attempts: Mapping[str, Attempt]) -> str:
    """Says what happens without that step."""
    first = next(iter(attempts.values()))
    return f"else {_said(first)}"


def _failure(attempts: Mapping[str, Attempt]) -> str:
    kinds = [attempt for attempt in attempts.values() if attempt.kind != "no target"] or [*attempts.values()]
    return _said(kinds[-1])


def _said(attempt: Attempt) -> str:
    name = attempt.outcome.split(":")[0]
    if attempt.kind == "refused":
        reason = next((short for pattern, short in _REASONS if re.search(pattern, attempt.outcome)), attempt.outcome)
        return f"refused ({reason})"
    if attempt.kind == "no target":
        return f"it cannot make that step ({name})"
    if attempt.kind in ("raised", "save"):
        return f"torch raises {name}"
    if attempt.kind == "next step":
        return "its next step differs, as with stock DCP"
    return f"torch loses state{', we warn' if attempt.warning else ''}"

# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown of what came back, with the optimizers that had the same outcome in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from optimizers.trials import Trial
from optimizers.verdicts import verdict
from optimizers.ways import LIVE, OWN, TORCH

__all__ = ["faults", "report"]

_WAYS = (LIVE, OWN, TORCH)


def report(plain: Sequence[Trial], sharded: Sequence[Trial]) -> str:
    """Returns the tables of one process and of FSDP2, and what could not be tried."""
    parts = [f"In one process:\n\n{_table(plain)}", f"Under FSDP2, on two ranks:\n\n{_table(sharded)}"]
    for trials, where in ((plain, "on this machine"), (sharded, "under FSDP2")):
        unusable = [trial for trial in trials if trial.unusable]
        if unusable:
            parts.append(f"Cannot train {where}: {_named(unusable, trials)}.")
    return "\n\n".join(parts)


def faults(trials: Iterable[Trial]) -> list[str]:
    """Returns what is our fault, one line for each optimizer and way."""
    return [
        f"{trial.name}, {way}: {found.text}"
        for trial in trials
        if not trial.unusable
        for way in _WAYS
        if (found := verdict(trial, way)).is_fault
    ]


def _table(trials: Sequence[Trial]) -> str:
    rows: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        if not trial.unusable:
            rows.setdefault(tuple(verdict(trial, way).text for way in _WAYS), []).append(trial)
    lines = [f"| optimizers | `{LIVE}` | `{OWN}` | `{TORCH}` |", "| --- | --- | --- | --- |"]
    for texts, of_row in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {_named(of_row, trials)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _named(some: Sequence[Trial], every: Sequence[Trial]) -> str:
    """Names optimizers by module. Of a module of which more than half, and more than three, are meant: all others."""
    of_every = Counter(_module(trial) for trial in every)
    by_module: dict[str, list[str]] = {}
    for trial in some:
        by_module.setdefault(_module(trial), []).append(trial.name.split(":")[1])
    texts = []
    for module, names in by_module.items():
        is_most = len(names) > 3 and 2 * len(names) > of_every[module]
        others = f"all {len(names)}" if len(names) == of_every[module] else f"all {len(names)} others"
        texts.append(f"{module}: {others if is_most else ', '.join(names)}")
    return "; ".join(texts)


def _module(trial: Trial) -> str:
    return trial.name.split(":")[0]

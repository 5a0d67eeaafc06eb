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
    parts = []
    for trials, title, where in (
        (plain, "In one process:", "on this machine"),
        (sharded, "Under FSDP2, on two ranks:", "under FSDP2"),
    ):
        rows: dict[tuple[str, ...], list[Trial]] = {}
        for trial in trials:
            texts = ("",) if trial.unusable else tuple(verdict(trial, way).text for way in _WAYS)
            rows.setdefault(texts, []).append(trial)
        lines = [f"| optimizers | `{LIVE}` | `{OWN}` | `{TORCH}` |", "| --- | --- | --- | --- |"]
        for texts, of_row in sorted(rows.items(), key=lambda row: -len(row[1])):
            if texts != ("",):
                lines.append(f"| {_named(of_row, [*rows.values()])} | {' | '.join(texts)} |")
        parts += [title, "\n".join(lines)]
        if unusable := rows.get(("",)):
            parts.append(f"Cannot train {where}: {_named(unusable, [*rows.values()])}.")
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


def _named(row: Sequence[Trial], rows: Sequence[Sequence[Trial]]) -> str:
    """Names the optimizers of a row by module. Those of the row that has most of a module are "all others"."""
    counts = [Counter(map(_module, each)) for each in rows]
    by_module: dict[str, list[str]] = {}
    for trial in row:
        by_module.setdefault(_module(trial), []).append(trial.name.split(":")[1])
    texts = []
    for module, names in by_module.items():
        most = max(counts, key=lambda count: count[module])
        is_most = len(names) > 3 and most == Counter(map(_module, row))
        others = "" if sum(count[module] for count in counts) == len(names) else " others"
        texts.append(f"{module}: {f'all {len(names)}{others}' if is_most else ', '.join(names)}")
    return "; ".join(texts)


def _module(trial: Trial) -> str:
    return trial.name.split(":")[0]

# SPDX-License-Identifier: Apache-2.0
"""What to look at in a save or a load, in words: which rank, host or phase cost time, how much, and why.

A rank counts only if the call would have ended sooner without it. What the call lost must be at least 50 ms and a tenth
of the call, the cause must stand out of the noise of the other ranks, and it must account for much of the loss. So a
healthy run has no findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytecheckpoint.findings.figures import RankFigures, number, rank_figures, report_of, spread, typical
from bytecheckpoint.findings.finding import Finding, Outlier, grouped
from bytecheckpoint.findings.phase_findings import of_phases
from bytecheckpoint.report.text import duration_text, size_text

__all__ = ["Finding", "findings"]

_LEAST_S = 0.05
_LEAST_SHARE = 0.1
_LEAST_LATENESS_S = 0.1
_LEAST_LATENESS_SHARE = 0.05
# How far from the others a rank must be, in units of `spread`.
_DEVIATIONS = 3.0
# The part of a rank's lateness that a cause must account for.
_LEAST_PART = 0.3
_STORAGE = {"save": ("write", "sync", "request"), "load": ("read", "request")}
_MEMORY = {"save": ("copy", "checksum"), "load": ("verify", "scatter")}


def findings(record: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = ()) -> list[Finding]:
    """Returns what to look at in one save or load. What cost most comes first.

    Args:
        record: A record of the journal.
        history: The records before it, oldest first. The last ten like it, by kind, ranks and size, are compared.
    """
    figures = rank_figures(record)
    of_ranks = list(_of_ranks(record, figures)) if len(figures.ranks) > 1 else []
    found = [*of_ranks, *of_phases(record, figures, of_ranks, history)]
    return sorted(found, key=lambda finding: -finding.seconds)


def _of_ranks(record: Mapping[str, Any], figures: RankFigures) -> Iterator[Finding]:
    outliers = [*_late_arrivals(record, figures), *_slow_plans(record, figures), *_slow_stagings(record, figures)]
    shared = list(_shared_reading(record, figures))
    outliers += shared or _late_ends(record, figures)
    yield from grouped(record, figures, outliers)


def _least_loss(record: Mapping[str, Any]) -> float:
    return max(_LEAST_S, _LEAST_SHARE * number(report_of(record), "total_s"))


def _least_ratio(num_ranks: int) -> float:
    """Of few ranks, the one that is compared with may itself be fast by chance."""
    return 1.5 if num_ranks >= 8 else 1.8


def _kind(record: Mapping[str, Any]) -> str:
    return "load" if record.get("kind") == "load" else "save"


class _Expected:
    """What a rank should take for its bytes: what the others take by the byte, and never less than what they take."""

    def __init__(self, seconds: Sequence[float], num_bytes: Sequence[float] | None) -> None:
        self._seconds, self._num_bytes = seconds, num_bytes
        self._typical = typical(sorted(seconds))
        of_byte = [s / b for s, b in zip(seconds, num_bytes, strict=True) if b > 0] if num_bytes else []
        self.rate = typical(sorted(of_byte)) if of_byte else 0.0

    def at(self, index: int) -> float:
        return max(self._typical, self.rate * self._num_bytes[index] if self._num_bytes else 0.0)

    def excess(self, index: int) -> float:
        return self._seconds[index] - self.at(index)

    def ratio(self, index: int) -> float:
        return self._seconds[index] / max(self.at(index), 1e-9)


def _late_arrivals(record: Mapping[str, Any], figures: RankFigures) -> Iterator[Outlier]:
    """Ranks that began the call after the others, which wait for them to exchange plans."""
    arrived = figures.columns.get("arrived_s")
    if arrived is None:
        return
    errors = figures.columns.get("clock_error_s") or [0.0] * len(arrived)
    ordered = sorted(arrived)
    usual = typical(ordered)
    least = max(
        _LEAST_LATENESS_S,
        _LEAST_LATENESS_SHARE * number(report_of(record), "total_s"),
        _DEVIATIONS * spread(ordered),
    )
    for index, at in enumerate(arrived) if ordered[-1] - usual >= least else ():
        late = at - usual
        if late >= least and 0 <= 3 * errors[index] <= late:
            yield Outlier(
                "late_arrival",
                index,
                "exchange",
                late,
                0.0,
                f"began {duration_text(late)} after the others, which waited for it",
                "Look at what it did before the call: a slow step, a slow data loader, or another call of its own.",
            )


def _slow_plans(record: Mapping[str, Any], figures: RankFigures) -> Iterator[Outlier]:
    plan = figures.phases.get("plan")
    if plan is None:
        return
    least = max(_LEAST_LATENESS_S, _LEAST_LATENESS_SHARE * number(report_of(record), "total_s"))
    expected = _Expected(plan, None)
    for index, seconds in enumerate(plan) if max(plan) - expected.at(0) >= least else ():
        excess = expected.excess(index)
        if excess >= least and expected.ratio(index) >= 2.0:
            yield Outlier(
                "slow_cpu",
                index,
                "plan",
                excess,
                expected.ratio(index),
                f"took {duration_text(seconds)} to plan, {expected.ratio(index):.1f} times as long as the others, "
                "which waited",
                "Look at what else uses its processor.",
            )


def _slow_stagings(record: Mapping[str, Any], figures: RankFigures) -> Iterator[Outlier]:
    """Ranks that copy their state slowly for a background save: training waits for the last of them."""
    stage = figures.phases.get("stage")
    if stage is None:
        return
    expected = _Expected(stage, figures.columns.get("num_bytes"))
    least, ratio = max(_LEAST_S, 0.2 * typical(sorted(stage))), _least_ratio(len(stage))
    for index, seconds in enumerate(stage):
        if expected.excess(index) >= least and expected.ratio(index) >= ratio:
            yield Outlier(
                "slow_memory",
                index,
                "stage",
                expected.excess(index),
                expected.ratio(index),
                f"took {duration_text(seconds)} to copy its state for the background save, "
                f"{expected.ratio(index):.1f} times as long as the others by the byte",
                "Look at what else uses its memory or its processor.",
            )


def _late_ends(record: Mapping[str, Any], figures: RankFigures) -> Iterator[Outlier]:
    """Ranks that had done their part after the others, with what distinguishes each."""
    ended = figures.columns.get("ended_s")
    if ended is None:
        return
    ordered = sorted(ended)
    usual = typical(ordered)
    least = max(_least_loss(record), _DEVIATIONS * spread(ordered))
    late = [index for index, at in enumerate(ended) if at - usual >= least]
    if not late:
        return
    causes = _Causes(record, figures)
    begin = max(figures.columns.get("arrived_s") or [0.0])
    for index in late:
        loss = ended[index] - usual
        outlier = causes.of(index, loss)
        if outlier is not None:
            yield outlier
        elif loss >= 2 * least and ended[index] - begin >= 2 * max(usual - begin, 0.0):
            yield Outlier(
                "unexplained",
                index,
                "",
                loss,
                (ended[index] - begin) / max(usual - begin, 1e-9),
                f"ended {duration_text(loss)} after the others, and no phase of it says why",
                "Look at what else ran on it.",
            )


class _Causes:
    """What may distinguish a rank that ended late: its bytes, its storage, its memory."""

    def __init__(self, record: Mapping[str, Any], figures: RankFigures) -> None:
        kind = _kind(record)
        self._figures, self._kind = figures, kind
        self._ratio = _least_ratio(len(figures.ranks))
        self._plan = report_of(record).get("plan")
        self._niceness = number(record.get("config"), "niceness") if record.get("is_async") is True else 0.0
        self._num_bytes = figures.columns.get("num_bytes")
        self._phases = {
            "slow_storage": {name: figures.phases[name] for name in _STORAGE[kind] if name in figures.phases},
            "slow_memory": {name: figures.phases[name] for name in _MEMORY[kind] if name in figures.phases},
        }
        self._of_phase = {
            name: _Expected(seconds, self._num_bytes)
            for phases in self._phases.values()
            for name, seconds in phases.items()
        }
        self._usual_bytes = typical(sorted(self._num_bytes)) if self._num_bytes else 0.0

    def of(self, index: int, loss: float) -> Outlier | None:
        """Returns the cause that accounts for most of a loss; None if no cause stands out."""
        found = [outlier for outlier in (self._bytes(index, loss), *self._slow(index, loss)) if outlier is not None]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _bytes(self, index: int, loss: float) -> tuple[float, Outlier] | None:
        if self._num_bytes is None or not self._of_phase:
            return None
        own, usual = self._num_bytes[index], self._usual_bytes
        rate = max(expected.rate for expected in self._of_phase.values())
        excess = rate * (own - usual)
        ratio = own / usual if usual else own / max(sum(self._num_bytes) / len(self._num_bytes), 1.0)
        if ratio < self._ratio or excess < _LEAST_PART * loss:
            return None
        did, phase = ("wrote", "write") if self._kind == "save" else ("read", "read")
        sizes = f"{did} {size_text(int(own))}, where the others {did} {size_text(int(usual))}"
        text = f"{sizes}, and ended {duration_text(loss)} later"
        return excess, Outlier("more_bytes", index, phase, loss, ratio, text, self._balance_advice())

    def _balance_advice(self) -> str:
        if self._kind == "load":
            return "Look at how its model is sharded: this rank wants more than the others."
        if isinstance(self._plan, Mapping) and self._plan.get("cache") == "off":
            return "Save with BcpSavePlanner or register(), which balance what several ranks hold."
        return "Shard what only this rank holds; what several ranks hold is balanced already."

    def _slow(self, index: int, loss: float) -> Iterator[tuple[float, Outlier]]:
        for cause, phases in self._phases.items():
            if not phases:
                continue
            phase = max(phases, key=lambda name: self._of_phase[name].excess(index))
            excess, ratio = self._of_phase[phase].excess(index), self._of_phase[phase].ratio(index)
            if ratio < self._ratio or excess < _LEAST_PART * loss:
                continue
            verb = {"sync": "synced its files", "read": "read", "write": "wrote", "request": "was served"}.get(phase)
            later = f"{duration_text(loss)} later"
            if cause == "slow_storage":
                text = f"{verb} {ratio:.1f} times as slowly as the others by the byte, and ended {later}"
                advice = "Look at its disk, its mount and its network: its storage is slower than that of the others."
            else:
                text = f"took {ratio:.1f} times as long as the others to {phase} a byte, and ended {later}"
                advice = "Look at what else uses its memory or its processor."
                if self._niceness > 0:
                    advice += f" Its threads ran with Config(niceness={self._niceness:.0f}), so all else goes first."
            yield excess, Outlier(cause, index, phase, loss, ratio, text, advice)


def _shared_reading(record: Mapping[str, Any], figures: RankFigures) -> Iterator[Outlier]:
    """Ranks that read slowly for others: these wait for it, so all of them end late together."""
    waited, read = figures.phases.get("wait_peer"), figures.sum_of(*_STORAGE["load"])
    if waited is None or read is None or _kind(record) != "load":
        return
    usual_wait = sorted(waited)[len(waited) // 2]  # the slow reader itself does not wait
    if usual_wait < _least_loss(record):
        return
    expected = _Expected(read, figures.columns.get("num_bytes"))
    by_all = _Expected(read, None)
    for index in range(len(read)):
        is_slow = expected.ratio(index) >= _least_ratio(len(read))
        if by_all.ratio(index) < _least_ratio(len(read)) or by_all.excess(index) < usual_wait * _LEAST_PART:
            continue
        if waited[index] > 0.5 * usual_wait:  # it waited itself
            continue
        slowly = f"{expected.ratio(index):.1f} times as slowly as the others by the byte"
        how = slowly if is_slow else "more than the others"
        advice = "Look at its disk, its mount and its network." if is_slow else "Look at which keys it holds."
        if usual_wait >= 0.3 * number(report_of(record), "total_s"):
            advice += ' Config(shared_reading="independent") lets each rank read for itself, and reads more in all.'
        yield Outlier(
            "shared_reading",
            index,
            "read",
            usual_wait,
            by_all.ratio(index),
            f"read {how}; they waited {duration_text(usual_wait)} for the blocks that it reads for them",
            advice,
        )

# SPDX-License-Identifier: Apache-2.0
"""What to look at in a call as a whole: phases of the coordinator, limits, and how it compares with calls before it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.findings.figures import RankFigures, number, report_of, typical
from bytecheckpoint.findings.finding import Finding
from bytecheckpoint.report.text import duration_text

__all__ = ["of_phases"]

_LEAST_S = 0.25
_LEAST_SHARE = 0.4
_NUM_BEFORE = 10
_LEAST_BEFORE = 3
_LEAST_GROWTH = 1.6
_OF_REPORTS = (
    *("plan_s", "global_plan_s", "begin_s", "exchange_s", "write_s", "wait_s", "assemble_s", "digest_s", "commit_s"),
    *("sweep_s", "metadata_s", "read_s", "objects_s"),
)
# Phases of the coordinator that should be short: what they are, and what helps.
_SHORT = {
    "save": {
        "begin_s": ("taking the right to commit: the lock, files of dead saves, reserving space", ""),
        "assemble_s": ("joining what was planned with what was written", ""),
        "digest_s": (
            "reading back what was written, for the digest",
            "Config(digest=False) saves without a digest; bcp digest computes one later.",
        ),
        "commit_s": (
            "the commit: checking files, writing and syncing .metadata, the rename",
            "The storage is slow at small files and at fsync; bcp doctor PATH looks at it.",
        ),
        "sweep_s": (
            "removing the data files of older saves at the same path",
            "Save each step into a folder of its own, and let a retention remove old ones.",
        ),
    },
    "load": {
        "metadata_s": ("reading .metadata", ""),
        "objects_s": ("reading and unpacking what is not a tensor", "Keep large values as tensors."),
    },
}


def of_phases(
    record: Mapping[str, Any],
    figures: RankFigures,
    of_ranks: Sequence[Finding],
    history: Sequence[Mapping[str, Any]],
) -> Iterator[Finding]:
    """Yields findings that are about no rank in particular.

    Args:
        record: The record.
        figures: Its columns.
        of_ranks: What was found about ranks, which may explain what the coordinator waited for.
        history: The records before it.
    """
    before = _alike(record, history)
    found = [*_short_phases(record), *_waiting(record, of_ranks), *_rate_limit(record, figures)]
    if not any(finding.phase == "plan" for finding in of_ranks):
        # The coordinator has the plans of all ranks when the last rank has come.
        late_s = max((finding.seconds for finding in of_ranks if finding.kind == "late_arrival"), default=0.0)
        found += _planning(record, before, late_s)
    yield from found
    yield from _blocked(record, figures, history)
    yield from _slower(record, [*of_ranks, *found], before)
    yield from _warnings(record)


def _alike(record: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns reports of the last records like this one: of its kind, from as many ranks, of about its size."""
    size = _size(report_of(record))
    found: list[Mapping[str, Any]] = []
    for other in reversed(history):
        is_alike = all(other.get(name) == record.get(name) for name in ("kind", "world_size", "is_async"))
        if is_alike and 0.5 * size <= _size(report_of(other)) <= 2 * size:
            found.append(report_of(other))
            if len(found) == _NUM_BEFORE:
                break
    return found


def _size(report: Mapping[str, Any]) -> float:
    return number(report, "total_bytes") or number(report, "total_bytes_wanted")


def _is_most(seconds: float, report: Mapping[str, Any]) -> bool:
    return seconds >= _LEAST_S and seconds >= _LEAST_SHARE * number(report, "total_s")


def _of_coordinator(record: Mapping[str, Any], name: str, seconds: float, what: str, advice: str) -> Finding:
    total_s = number(report_of(record), "total_s")
    share = min(1.0, seconds / total_s) if total_s else 1.0
    rank = record.get("rank")
    return Finding(
        kind="coordinator_phase",
        rank=rank if isinstance(rank, int) else None,
        phase=name,
        seconds=seconds,
        ratio=share,
        text=f"the coordinator spent {duration_text(seconds)}, {share:.0%} of the call, on {what}",
        advice=advice,
    )


def _short_phases(record: Mapping[str, Any]) -> Iterator[Finding]:
    report = report_of(record)
    for name, (what, advice) in _SHORT["load" if record.get("kind") == "load" else "save"].items():
        seconds = number(report, name)
        if _is_most(seconds, report):
            yield _of_coordinator(record, _phase_of(name), seconds, what, advice)


def _phase_of(name: str) -> str:
    """Returns the phase whose seconds are in this field of a report, such as "commit" of "commit_s"."""
    return name[:-2]


def _planning(record: Mapping[str, Any], before: Sequence[Mapping[str, Any]], late_s: float) -> Iterator[Finding]:
    report = report_of(record)
    seconds = number(report, "plan_s") + number(report, "global_plan_s") - late_s
    if not _is_most(seconds, report):
        return
    caches = [_cache(each) for each in (*before, report)]
    what, advice = "planning", ""
    if record.get("kind") != "load" and caches[-1] != "hit":
        what += " without a kept plan"
        if caches[-1] == "off":
            advice = "Save with BcpSavePlanner or register(), which keep plans."
        elif len(caches) > _LEAST_BEFORE and caches.count("miss") > len(caches) // 2:
            capacity = number(record.get("config"), "planner_cache_capacity") or Config.planner_cache_capacity
            advice = (
                f"{caches.count('miss')} of {len(caches)} saves made a new plan: the keys or shapes of the state "
                f"change, or more than Config(planner_cache_capacity={capacity:.0f}) states take turns."
            )
    yield _of_coordinator(record, "plan", seconds, what, advice)


def _cache(report: Mapping[str, Any]) -> Any:
    plan = report.get("plan")
    return plan.get("cache") if isinstance(plan, Mapping) else None


def _waiting(record: Mapping[str, Any], of_ranks: Sequence[Finding]) -> Iterator[Finding]:
    """What the coordinator waited for, unless a rank is to blame for it."""
    if of_ranks:
        return
    report, config = report_of(record), record.get("config")
    exchange_s, wait_s = number(report, "exchange_s"), number(report, "wait_s")
    if _is_most(exchange_s, report):
        advice = ""
        if isinstance(config, Mapping) and config.get("enable_tree_topo") is False:
            advice = "Config(enable_tree_topo=True) lets the plans of many ranks travel through a tree."
        what = "the exchange of plans, in which it waits for the others; none of them stands out"
        yield _of_coordinator(record, "exchange", exchange_s, what, advice)
    if wait_s >= _LEAST_S and wait_s >= 0.6 * number(report, "total_s"):
        what = "waiting until the other ranks were done; none of them stands out"
        yield _of_coordinator(record, "wait", wait_s, what, "")


def _blocked(
    record: Mapping[str, Any], figures: RankFigures, history: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """A background save that waited until the one before it had ended."""
    blocked_s = number(report_of(record), "blocked_s")
    staged_s = max(figures.phases.get("stage") or [0.0])
    before = next((other for other in reversed(history) if other.get("kind") == record.get("kind")), None)
    if record.get("is_async") is not True or before is None:
        return
    over_s = number(before, "at") + number(report_of(before), "total_s") - number(record, "at")
    waited_s = min(blocked_s - staged_s, over_s)
    if waited_s < max(_LEAST_S, 0.5 * blocked_s):
        return
    config = record.get("config")  # of a journal it has what is not the default
    advice = "Save less often, or make saves faster."
    if isinstance(config, Mapping) and config.get("on_staging_busy", Config.on_staging_busy) == "wait":
        advice = 'Config(on_staging_busy="double_buffer") gives the next state memory of its own, if the host has it.'
    yield Finding(
        kind="blocked",
        phase="stage",
        seconds=waited_s,
        ratio=blocked_s / max(staged_s, 1e-3),
        text=f"training stood still for {duration_text(blocked_s)}, {duration_text(waited_s)} of it because the save "
        "before was not done",
        advice=advice,
    )


def _rate_limit(record: Mapping[str, Any], figures: RankFigures) -> Iterator[Finding]:
    limit = number(record.get("config"), "write_bytes_per_s")
    report, num_bytes = report_of(record), figures.columns.get("num_bytes")
    write_s = number(report, "write_s")
    if limit <= 0 or num_bytes is None or record.get("kind") == "load" or not _is_most(write_s, report):
        return
    rate = typical(sorted(num_bytes)) / write_s
    if 0.8 * limit <= rate:
        yield Finding(
            kind="rate_limit",
            phase="write",
            seconds=write_s,
            ratio=rate / limit,
            text=f"ranks wrote {rate / 1e6:,.0f} MB/s, which is the limit of {limit / 1e6:,.0f} MB/s that is set",
            advice=f"Config(write_bytes_per_s={limit:.0f}) is what holds it back; 0 sets no limit.",
        )


def _slower(
    record: Mapping[str, Any], found: Sequence[Finding], before: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """A call that took longer than those before it, for a reason that nothing else explains."""
    report = report_of(record)
    total_s = number(report, "total_s")
    if len(before) < _LEAST_BEFORE:
        return
    totals = [number(each, "total_s") for each in before]
    usual_s = statistics.median(totals)
    lost_s = total_s - usual_s
    deviation = 1.4826 * statistics.median(abs(each - usual_s) for each in totals)
    if lost_s < max(_LEAST_S, 5 * deviation) or total_s < _LEAST_GROWTH * usual_s:
        return
    if sum(finding.seconds for finding in found) >= 0.5 * lost_s:
        return
    growth = {
        name: number(report, name) - statistics.median(number(each, name) for each in before) for name in _OF_REPORTS
    }
    most = max(growth, key=lambda name: growth[name])
    phase = _phase_of(most) if growth[most] > 0 else ""
    where = f"; {phase} took {duration_text(growth[most])} more" if phase else ""
    yield Finding(
        kind="slower_than_before",
        phase=phase,
        seconds=lost_s,
        ratio=total_s / max(usual_s, 1e-9),
        text=f"the call took {duration_text(total_s)}, {total_s / max(usual_s, 1e-9):.1f} times as long as the last "
        f"{len(before)} like it{where}",
        advice="Look at what else used the storage or the network at that time.",
    )


def _warnings(record: Mapping[str, Any]) -> Iterator[Finding]:
    warnings = report_of(record).get("warnings")
    for warning in warnings if isinstance(warnings, list) else ():
        if isinstance(warning, str):
            yield Finding(
                kind="warning", phase="", text=f"a problem after the commit, which did not undo it: {warning}"
            )

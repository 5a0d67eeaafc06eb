# SPDX-License-Identifier: Apache-2.0
"""What to look at in a run: the findings of its saves and loads, with those of the same cause as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.findings.figures import text_of
from bytecheckpoint.findings.findings import Finding, findings
from bytecheckpoint.observability.whole_calls import num_calls, whole_calls
from bytecheckpoint.report.text import duration_text, utc_text
from bytecheckpoint.storage.save_records import UNENDED

__all__ = ["Trouble", "failure_text", "findings_of_all", "troubles"]

_NUM_BEFORE = 40  # records that are searched for ten that are like the one that is looked at


@dataclass(frozen=True)
class Trouble:
    """The same finding in one or more calls.

    Attributes:
        finding: The one of the call that lost most.
        calls: Indices of the records, oldest first.
        worst: Index of the record that lost most.
        seconds: Seconds that all of them lost together.
        num_found: How many calls that are. A save of several parts, of which each has a record, is one.
        num_calls: How many calls of that kind were looked at.
        kind: ``save`` or ``load``.
    """

    finding: Finding
    calls: tuple[int, ...]
    worst: int
    seconds: float
    num_found: int
    num_calls: int
    kind: str

    def how_often(self) -> str:
        """Returns how many calls it is about, for people."""
        noun = self.kind if self.num_calls == 1 else f"{self.kind}s"
        return f"in {self.num_found:,} of {self.num_calls:,} {noun}"


def findings_of_all(records: Sequence[Mapping[str, Any]]) -> list[list[Finding]]:
    """Returns the findings of each record; those before it are its history.

    Args:
        records: Records, oldest first.
    """
    return [findings(record, records[max(0, at - _NUM_BEFORE) : at]) for at, record in enumerate(records)]


def troubles(records: Sequence[Mapping[str, Any]], found: Sequence[Sequence[Finding]]) -> list[Trouble]:
    """Returns what to look at in all records together. What cost most comes first.

    Args:
        records: Records, oldest first.
        found: The findings of each of them.
    """
    by_cause: dict[tuple[Any, ...], list[tuple[int, Finding]]] = {}
    for at, (record, of_record) in enumerate(zip(records, found, strict=True)):
        for finding in of_record:
            what = finding.text if finding.kind == "warning" else ""
            key = (record["kind"], finding.kind, finding.rank, finding.host, finding.phase, what)
            by_cause.setdefault(key, []).append((at, finding))
    whole = whole_calls(records)
    num_of_kind = {kind: num_calls(records, kind) for kind in {key[0] for key in by_cause}}
    made = []
    for key, of_cause in by_cause.items():
        worst, finding = max(of_cause, key=lambda pair: pair[1].seconds)
        calls = tuple(at for at, _ in of_cause)
        seconds = sum(each.seconds for _, each in of_cause)
        num_found = len({whole[at] for at in calls})
        made.append(Trouble(finding, calls, worst, seconds, num_found, num_of_kind[key[0]], key[0]))
    return sorted(made, key=lambda trouble: -trouble.seconds)


def failure_text(record: Mapping[str, Any]) -> str:
    """Returns the record of a call that failed in words. Anybody may have written it."""
    seconds, error_type = record.get("total_s"), text_of(record, "error_type")
    after = f", after {duration_text(seconds)}" if isinstance(seconds, int | float) and 0 <= seconds < 1e9 else ""
    why = text_of(record, "message") if error_type == UNENDED else f"{error_type}: {text_of(record, 'message')}"
    what = f"{text_of(record, 'of') or 'call'} of {text_of(record, 'path') or '?'}"
    return f"{utc_text(record.get('at'))}, {what}{after}: {why}"

# SPDX-License-Identifier: Apache-2.0
"""Which records of a journal belong to one call: ``bytecheckpoint.save`` and ``load`` have one for each of their parts.

Nothing in a record says so but the path of its checkpoint, such as ``step_100/model``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from bytecheckpoint.findings.figures import text_of
from bytecheckpoint.storage.parts import PARTS

__all__ = ["num_calls", "of_newest_calls", "part_of", "whole_calls"]


def part_of(record: Mapping[str, Any]) -> str:
    """Returns which part of a step a record is of, such as ``model``; "" if it is of a whole checkpoint."""
    name = text_of(record, "path").rpartition("/")[2]
    return name if name in PARTS else ""


def whole_calls(records: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """Returns a key for each record. Those of one save, or of one load, have the same.

    If a step was saved twice, its newest records of each part belong together, and the ones before them.

    Args:
        records: Records, oldest first.
    """
    nth: Counter[Hashable] = Counter()
    keys: list[Hashable] = []
    for at in range(len(records) - 1, -1, -1):
        record, part = records[at], part_of(records[at])
        if not part:
            keys.append((record["kind"], at))
            continue
        of_part = record["kind"], text_of(record, "path")
        keys.append((record["kind"], of_part[1].removesuffix(part), nth[of_part]))
        nth[of_part] += 1
    return keys[::-1]


def num_calls(records: Sequence[Mapping[str, Any]], kind: str) -> int:
    """Returns how many saves or loads there are, however many parts each of them has.

    Args:
        records: Records, oldest first.
        kind: ``save`` or ``load``.
    """
    keys = whole_calls(records)
    return len({key for record, key in zip(records, keys, strict=True) if record["kind"] == kind})


def of_newest_calls(records: Sequence[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Returns the records of the newest ``last`` calls, saves and loads together."""
    keys = whole_calls(records)
    newest = {*[*dict.fromkeys(reversed(keys))][:last]}
    return [record for record, key in zip(records, keys, strict=True) if key in newest]

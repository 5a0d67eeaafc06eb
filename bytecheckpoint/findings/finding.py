# SPDX-License-Identifier: Apache-2.0
"""A finding, and how findings of single ranks become one of a host."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bytecheckpoint.findings.figures import RankFigures
from bytecheckpoint.listing import listed

__all__ = ["Finding", "Outlier", "grouped"]

# A host is named in the place of its ranks if at least this part of them has the same cause.
_LEAST_OF_HOST = 0.6
# If more ranks have the same cause, the worst of them is named, and the others are counted.
_MOST_RANKS = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to look at.

    Attributes:
        kind: ``more_bytes``, ``slow_storage``, ``slow_memory``, ``slow_cpu``, ``late_arrival``, ``shared_reading`` or
            ``unexplained`` of ranks; ``coordinator_phase``, ``blocked``, ``rate_limit``, ``slower_than_before`` or
            ``warning`` of the whole call.
        rank: The rank; None if it is about a host or about nobody in particular.
        host: Name of the host, if it is known.
        phase: The phase in which it shows; "" if there is none.
        seconds: Seconds that the call lost because of it, as far as they can be told.
        ratio: How many times as much as usual; 0 where that has no meaning.
        text: A sentence that says what was found.
        advice: A sentence that says what to do; "" if there is nothing to say.
    """

    kind: str
    rank: int | None = None
    host: str | None = None
    phase: str = ""
    seconds: float = 0.0
    ratio: float = 0.0
    text: str = ""
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns its fields, rounded, for JSON."""
        return dataclasses.asdict(self) | {"seconds": round(self.seconds, 6), "ratio": round(self.ratio, 3)}


class Outlier(NamedTuple):
    """What distinguishes one rank: ``entry`` is its place in the columns, and ``text`` follows its name."""

    kind: str
    entry: int
    phase: str
    seconds: float
    ratio: float
    text: str
    advice: str


def grouped(record: Mapping[str, Any], figures: RankFigures, outliers: Sequence[Outlier]) -> Iterator[Finding]:
    """Yields findings: of hosts most of whose ranks have the same cause, and of the other ranks."""
    by_cause: dict[tuple[str, str], list[Outlier]] = defaultdict(list)
    for outlier in outliers:
        by_cause[outlier.kind, outlier.phase].append(outlier)
    sizes = Counter(figures.host)
    for of_cause in by_cause.values():
        by_host: dict[int, list[Outlier]] = defaultdict(list)
        for outlier in of_cause:
            by_host[figures.host[outlier.entry] if figures.host else -1].append(outlier)
        left = []
        for host, of_host in by_host.items():
            if len(sizes) > 1 and len(of_host) > 1 and len(of_host) >= _LEAST_OF_HOST * sizes[host]:
                yield _of_host(figures, host, of_host, sizes[host])
            else:
                left += of_host
        left.sort(key=lambda outlier: -outlier.seconds)
        if len(left) > _MOST_RANKS:
            yield _of_rank(figures, left[0], left[1:])
        else:
            yield from (_of_rank(figures, outlier, ()) for outlier in left)


def _of_rank(figures: RankFigures, outlier: Outlier, others: Sequence[Outlier]) -> Finding:
    rank, host = figures.ranks[outlier.entry], figures.host_of(outlier.entry)
    text = f"rank {rank}{f' on {host}' if host is not None else ''} {outlier.text}"
    if others:
        names = listed([str(figures.ranks[other.entry]) for other in others], most=8)
        text += f"; so did {len(others)} other ranks to a lesser degree: {names}"
    return Finding(
        kind=outlier.kind,
        rank=rank,
        host=host,
        phase=outlier.phase,
        seconds=outlier.seconds,
        ratio=outlier.ratio,
        text=text,
        advice=outlier.advice,
    )


def _of_host(figures: RankFigures, host: int, outliers: Sequence[Outlier], size: int) -> Finding:
    worst = max(outliers, key=lambda outlier: outlier.seconds)
    who = f"all {size}" if len(outliers) == size else f"{len(outliers)} of the {size}"
    return Finding(
        kind=worst.kind,
        host=figures.hosts[host],
        phase=worst.phase,
        seconds=worst.seconds,
        ratio=worst.ratio,
        text=f"{figures.hosts[host]}: {who} ranks of this host stand out; the worst, rank "
        f"{figures.ranks[worst.entry]}, {worst.text}",
        advice=worst.advice,
    )

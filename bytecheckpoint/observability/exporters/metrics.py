# SPDX-License-Identifier: Apache-2.0
"""What exporters measure of a call, under the names and in the units of OpenTelemetry's semantic conventions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["FAILURES", "METRICS", "Measurement", "Metric", "measurements_of", "phases_of", "scalars_of"]

# Seconds; bytes from a megabyte to 256 TB.
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_BYTES = tuple(float(1 << exponent) for exponent in range(20, 49, 2))
# The phases of the coordinator follow one another in this order, and add up to the whole.
_PHASES = {
    "save": (
        *("plan_s", "global_plan_s", "begin_s", "exchange_s", "write_s", "wait_s"),
        *("assemble_s", "digest_s", "commit_s", "sweep_s"),
    ),
    "load": ("metadata_s", "plan_s", "exchange_s", "read_s", "objects_s", "wait_s"),
}


@dataclass(frozen=True)
class Metric:
    """A metric of calls: a histogram.

    Attributes:
        name: Name, with dots.
        unit: Unit as UCUM writes it: ``s`` or ``By``.
        description: What it is, in words.
        buckets: Bounds of the histogram.
        labels: Names of the attributes.
        field: Field of the report.
    """

    name: str
    unit: str
    description: str
    buckets: tuple[float, ...]
    labels: tuple[str, ...] = ()
    field: str = ""


@dataclass(frozen=True)
class Measurement:
    """One value of a metric.

    Attributes:
        metric: The metric.
        value: The value, in the unit of the metric.
        attributes: Value of each label.
    """

    metric: Metric
    value: float
    attributes: dict[str, str]


def _of_kind(kind: str, label: str) -> tuple[Metric, ...]:
    size = "total_bytes" if kind == "save" else "total_bytes_wanted"
    what = "bytes written by all ranks" if kind == "save" else "bytes that all ranks wanted"
    return (
        Metric(f"checkpoint.{kind}.duration", "s", f"Time of a whole {kind}", _SECONDS, (label,), "total_s"),
        Metric(f"checkpoint.{kind}.size", "By", f"Size of a {kind}: {what}", _BYTES, (label,), size),
        Metric(
            f"checkpoint.{kind}.phase.duration",
            *("s", f"Time of a phase of a {kind} on the coordinator", _SECONDS, ("checkpoint.phase",)),
        ),
    )


METRICS = (
    *_of_kind("save", "checkpoint.mode"),
    Metric(
        "checkpoint.save.blocked_duration",
        *("s", "Time for which a save kept training waiting", _SECONDS, ("checkpoint.mode",), "blocked_s"),
    ),
    *_of_kind("load", "checkpoint.reading"),
    Metric(
        "checkpoint.load.read_size",
        *("By", "Bytes that all ranks read in a load", _BYTES, ("checkpoint.reading",), "total_bytes_read"),
    ),
)
"""Every metric except the counters of failures."""

FAILURES = {kind: f"checkpoint.{kind}.failures" for kind in ("save", "load")}
"""Names of the counters of failed calls, by kind. Their attribute is ``error.type``."""


def phases_of(record: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Returns the phases of the coordinator: name, seconds from the beginning of the call, length in seconds."""
    report = record.get("report", {})
    found, begin = [], 0.0
    for field in _PHASES.get(record["kind"], ()):
        length = report.get(field) or 0.0
        if length > 0:
            found.append((field[:-2], begin, length))  # without "_s"
        begin += length
    return found


def measurements_of(record: dict[str, Any]) -> Iterator[Measurement]:
    """Returns what is measured of a call.

    Args:
        record: Record of the call, as in the journal. What an older record lacks is left out.
    """
    report = record.get("report", {})
    label = (
        {"checkpoint.mode": "async" if record.get("is_async") else "sync"}
        if record["kind"] == "save"
        else {"checkpoint.reading": str(report.get("reading", "independent"))}
    )
    for metric in METRICS:
        if not metric.name.startswith(f"checkpoint.{record['kind']}."):
            continue
        if not metric.field:
            for phase, _, length in phases_of(record):
                yield Measurement(metric, length, {"checkpoint.phase": phase})
        elif report.get(metric.field) is not None:
            yield Measurement(metric, report[metric.field], label)


def scalars_of(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a call under names for charts, for example ``checkpoint/save_duration_s``."""
    report, kind = record.get("report", {}), record["kind"]
    scalars = {}
    for measured in measurements_of(record):
        name = measured.metric.name.removeprefix(f"checkpoint.{kind}.").replace(".", "_")
        unit = "s" if measured.metric.unit == "s" else "bytes"
        phase = measured.attributes.get("checkpoint.phase")
        of_phase = "" if phase is None else f"/{phase}"
        scalars[f"checkpoint/{kind}_{name}_{unit}{of_phase}"] = float(measured.value)
    for field in ("gb_per_s", "balance"):
        if report.get(field) is not None:
            scalars[f"checkpoint/{kind}_{field}"] = float(report[field])
    return scalars

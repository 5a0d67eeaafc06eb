# SPDX-License-Identifier: Apache-2.0
"""Metrics and traces for OpenTelemetry."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint.journal.failures import CallFailure
from bytecheckpoint.observability.exporters.metrics import FAILURES, METRICS, measurements_of, phases_of
from bytecheckpoint.report import LoadReport, SaveReport

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetryExporter"]

_SCOPE = "bytecheckpoint"
# Attributes of a span, by the name of the field of the record or of its report.
_ATTRIBUTES = {"path": "path", "step": "step", "save_id": "save_id", "world_size": "world_size", "is_async": "async"}
_OF_REPORT = {"total_bytes": "size", "total_bytes_wanted": "size", "blocked_s": "blocked_duration"}


class OpenTelemetryExporter:
    """Hands calls to OpenTelemetry: histograms, counters of failures, and spans.

    Each call is a span ``checkpoint.save`` or ``checkpoint.load``, with a span for each phase of the coordinator below
    it. They have the times at which all that happened. Where a span of yours is current in the thread that saves or
    loads, the span of the call is its child.

    Args:
        meter_provider: Where metrics go; None takes the global provider.
        tracer_provider: Where spans go; None takes the global provider.

    Raises:
        ImportError: OpenTelemetry is not installed (``pip install 'bytecheckpoint-dcp[otel]'``).
    """

    def __init__(
        self, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
    ) -> None:
        metrics: Any = import_module("opentelemetry.metrics")
        self._trace: Any = import_module("opentelemetry.trace")
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._tracer = self._trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._histograms = {
            metric.name: meter.create_histogram(
                metric.name,
                unit=metric.unit,
                description=metric.description,
                explicit_bucket_boundaries_advisory=metric.buckets,
            )
            for metric in METRICS
        }
        self._failures = {
            kind: meter.create_counter(name, unit="{failure}", description=f"Number of {kind}s that failed")
            for kind, name in FAILURES.items()
        }

    def export(self, report: SaveReport | LoadReport, record: dict[str, Any]) -> None:
        """Records the metrics of a call, and its spans."""
        for measured in measurements_of(record):
            self._histograms[measured.metric.name].record(measured.value, measured.attributes)
        kind, begin_ns = record["kind"], _ns(report.began_at)
        of_report = record.get("report", {})
        attributes = {f"checkpoint.{to}": record.get(name) for name, to in _ATTRIBUTES.items()}
        attributes |= {f"checkpoint.{to}": of_report[name] for name, to in _OF_REPORT.items() if name in of_report}
        span = self._tracer.start_span(
            f"checkpoint.{kind}",
            start_time=begin_ns,
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        below = self._trace.set_span_in_context(span)
        for phase, begin, length in phases_of(record):
            child = self._tracer.start_span(
                f"checkpoint.{kind}.{phase}",
                below,
                start_time=begin_ns + _ns(begin),
                attributes={"checkpoint.phase": phase},
            )
            child.end(end_time=begin_ns + _ns(begin + length))
        span.end(end_time=begin_ns + _ns(report.total_s))

    def export_failure(self, failure: CallFailure) -> None:
        """Counts a call that failed, and records its span, whose status is an error."""
        self._failures[failure.kind].add(1, {"error.type": failure.error_type})
        span = self._tracer.start_span(
            f"checkpoint.{failure.kind}",
            start_time=_ns(failure.began_at),
            attributes={"checkpoint.path": failure.path, "error.type": failure.error_type},
        )
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, failure.message))
        span.end(end_time=_ns(failure.began_at) + _ns(failure.total_s))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint.journal.failures import CallFailure
from bytecheckpoint.observability.exporters.metrics import FAILURES, METRICS, measurements_of
from bytecheckpoint.report import LoadReport, SaveReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["PrometheusExporter"]

_UNITS = {"s": "seconds", "By": "bytes"}


class PrometheusExporter:
    """Keeps metrics of calls in a registry of ``prometheus_client``.

    It serves nothing itself: call ``prometheus_client.start_http_server``, or ``push_to_gateway``.

    Args:
        registry: Registry to which the metrics are added; None takes the default one. It can have one such exporter.

    Raises:
        ImportError: ``prometheus_client`` is not installed (``pip install 'bytecheckpoint-dcp[prometheus]'``).
        ValueError: The registry has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        client: Any = import_module("prometheus_client")
        registry = client.REGISTRY if registry is None else registry
        self._histograms = {
            metric.name: client.Histogram(
                f"{_name(metric.name)}_{_UNITS[metric.unit]}",
                metric.description,
                [_label(label) for label in metric.labels],
                buckets=metric.buckets,
                registry=registry,
            )
            for metric in METRICS
        }
        self._failures = {
            kind: client.Counter(
                f"{_name(name)}_total", f"Number of {kind}s that failed", ["error_type"], registry=registry
            )
            for kind, name in FAILURES.items()
        }
        # For an alert where a run has saved nothing for too long.
        self._last = {
            kind: client.Gauge(
                _name(f"checkpoint.{kind}.last_success_timestamp.seconds"),
                f"Unix time at which the last {kind} that did not fail ended",
                registry=registry,
            )
            for kind in FAILURES
        }

    def export(self, report: SaveReport | LoadReport, record: dict[str, Any]) -> None:
        """Observes the metrics of a call."""
        for measured in measurements_of(record):
            labels = {_label(name): value for name, value in measured.attributes.items()}
            self._histograms[measured.metric.name].labels(**labels).observe(measured.value)
        self._last[record["kind"]].set(report.began_at + report.total_s)

    def export_failure(self, failure: CallFailure) -> None:
        """Counts a call that failed."""
        self._failures[failure.kind].labels(error_type=failure.error_type).inc()


def _name(name: str) -> str:
    return name.replace(".", "_")


def _label(name: str) -> str:
    return name.removeprefix("checkpoint.").replace(".", "_")

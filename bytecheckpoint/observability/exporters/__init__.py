# SPDX-License-Identifier: Apache-2.0
"""Exporters for ``bytecheckpoint.observe``. Each hands saves and loads to one library, and imports it when it is made.

docs/exporters.md shows each of them, and lists the metrics.
"""

from bytecheckpoint.observability.exporters.logs import LoggingExporter
from bytecheckpoint.observability.exporters.opentelemetry import OpenTelemetryExporter
from bytecheckpoint.observability.exporters.prometheus import PrometheusExporter
from bytecheckpoint.observability.exporters.tensorboard import TensorBoardExporter
from bytecheckpoint.observability.exporters.weights_and_biases import WandbExporter

__all__ = ["LoggingExporter", "OpenTelemetryExporter", "PrometheusExporter", "TensorBoardExporter", "WandbExporter"]

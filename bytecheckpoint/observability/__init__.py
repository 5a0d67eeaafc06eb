# SPDX-License-Identifier: Apache-2.0
"""The journal of a run, and what can be read from it: what to look at, a page, a trace, metrics."""

from bytecheckpoint.observability.failures import CallFailure
from bytecheckpoint.observability.findings import Finding, findings
from bytecheckpoint.observability.journal import read_failures, read_journal
from bytecheckpoint.observability.observers import Exporter, flush

__all__ = ["CallFailure", "Exporter", "Finding", "findings", "flush", "read_failures", "read_journal"]

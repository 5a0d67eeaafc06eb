# SPDX-License-Identifier: Apache-2.0
"""The journal of a run, and what can be read from it: what to look at, a page, a trace, metrics."""

from bytecheckpoint.findings.findings import Finding, findings
from bytecheckpoint.journal.failures import CallFailure
from bytecheckpoint.journal.observers import Exporter, flush
from bytecheckpoint.observability.journal import read_failures, read_journal

__all__ = ["CallFailure", "Exporter", "Finding", "findings", "flush", "read_failures", "read_journal"]

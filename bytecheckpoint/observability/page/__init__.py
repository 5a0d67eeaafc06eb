# SPDX-License-Identifier: Apache-2.0
"""The report of a run as one HTML file."""

from __future__ import annotations

from bytecheckpoint.observability.page.document import page_of

__all__ = ["page_of"]

# SPDX-License-Identifier: Apache-2.0
"""``bcp extract``."""

from __future__ import annotations

from bytecheckpoint.cli.convert import extract as command

__all__ = ["command"]

# SPDX-License-Identifier: Apache-2.0
"""``bcp rename``."""

from __future__ import annotations

from bytecheckpoint.cli.convert import rename as command

__all__ = ["command"]

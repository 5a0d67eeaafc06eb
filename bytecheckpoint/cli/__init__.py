# SPDX-License-Identifier: Apache-2.0
"""``bcp``, the command line. Each command has a file, and imports torch only when it needs it."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Runs ``bcp`` or ``python -m bytecheckpoint``. Returns the exit code, or ends the process with it."""
    try:
        from bytecheckpoint.cli.app import run

        return run()
    except KeyboardInterrupt:
        return 130

# SPDX-License-Identifier: Apache-2.0
"""``bcp``, the command line. One file a command; none imports torch before it needs it."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """What ``bcp`` and ``python -m bytecheckpoint`` run. Ends the process with the exit code, or returns it."""
    try:
        from bytecheckpoint.cli.app import run

        return run()
    except KeyboardInterrupt:
        return 130

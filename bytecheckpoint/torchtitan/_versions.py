# SPDX-License-Identifier: Apache-2.0
"""The versions that the adapter was tested with, and the refusal of others."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from bytecheckpoint.errors import UnsupportedError

__all__ = ["TESTED_TORCH", "TESTED_TORCHTITAN", "refuse_untested"]

TESTED_TORCHTITAN = ("0.3.0",)
TESTED_TORCH = ("2.13",)

_ADVICE = (
    "Install one of these, or call bytecheckpoint.register() before training, which needs nothing of torchtitan "
    "(README, torchtitan)"
)


def refuse_untested(titans: Sequence[str] = TESTED_TORCHTITAN) -> None:
    """Returns if torchtitan and torch are what the adapter was tested with.

    Args:
        titans: Releases of torchtitan.

    Raises:
        UnsupportedError: They are others. The message is all that a user has to know.
    """
    titan, torch = _installed("torchtitan"), _installed("torch")
    if titan not in titans:
        known = " or ".join(titans)
        raise UnsupportedError(
            f"bytecheckpoint.torchtitan is tested with torchtitan {known}, not with {titan or 'none'}. {_ADVICE}"
        )
    if not torch.startswith(tuple(f"{known}." for known in TESTED_TORCH)):
        known = " or ".join(f"{name}.x" for name in TESTED_TORCH)
        raise UnsupportedError(f"bytecheckpoint.torchtitan is tested with torch {known}, not with {torch}. {_ADVICE}")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

# SPDX-License-Identifier: Apache-2.0
"""Finds out which hooks of a planner, reader or writer somebody has overridden."""

from __future__ import annotations

from typing import Any

__all__ = ["Hooks"]


class Hooks:
    """The methods of a class, as they were when its module was imported.

    A method that later differs from them, in a subclass, the class or an instance, is an override and must be called.
    """

    def __init__(self, of: type) -> None:
        self._of = of
        self._saved = {name: getattr(of, name) for name in dir(of) if not name.startswith("__")}

    def are_own(self, instance: Any, *names: str) -> bool:
        """Returns whether ``instance`` is of the class and overrides none of the methods ``names``."""
        return isinstance(instance, self._of) and all(
            getattr(getattr(instance, name), "__func__", None) is self._saved[name] for name in names
        )

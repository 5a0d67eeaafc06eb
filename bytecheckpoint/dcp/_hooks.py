# SPDX-License-Identifier: Apache-2.0
"""Which hooks of a planner or reader are its own, and which somebody's."""

from __future__ import annotations

from typing import Any

__all__ = ["Hooks"]


class Hooks:
    """The methods of a class when its module was imported: what differs from them later, in a subclass, the class or an
    instance, is somebody's own and must be called."""

    def __init__(self, of: type) -> None:
        self._of = of
        self._saved = {name: getattr(of, name) for name in dir(of) if not name.startswith("__")}

    def are_own(self, instance: Any, *names: str) -> bool:
        """Are all of ``names`` as they were?"""
        return isinstance(instance, self._of) and all(
            getattr(getattr(instance, name), "__func__", None) is self._saved[name] for name in names
        )

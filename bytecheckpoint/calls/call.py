# SPDX-License-Identifier: Apache-2.0
"""A call in progress, as all parts know it: whether it still runs, and what it does."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Call", "Doing", "StatedCall"]

Doing: TypeAlias = tuple[str, float]
"""The phase of a call, and the seconds since it began."""


class Call(abc.ABC):
    """A call of the thread that makes this object.

    Attributes:
        doing: Returns what the call does; None if that is not known. Any thread.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self.doing: Callable[[], Doing | None] = _nobody_knows

    def is_of_this_thread(self) -> bool:
        """Returns whether the call was made in the current thread."""
        return self._thread is threading.current_thread()

    @abc.abstractmethod
    def is_running(self) -> bool:
        """Returns whether the call has not returned yet. Any thread may ask."""


class StatedCall(Call):
    """A call that ends when somebody says so: one of our own entry points."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False

    def is_running(self) -> bool:
        """Returns whether ``end`` was not called yet. Any thread may ask."""
        return not self._is_over

    def end(self) -> None:
        """Marks the call as ended. Any thread may call it."""
        self._is_over = True


def _nobody_knows() -> None:
    return None

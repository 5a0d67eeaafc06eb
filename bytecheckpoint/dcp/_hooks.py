# SPDX-License-Identifier: Apache-2.0
"""The hooks of a planner, reader or writer: which of them somebody has overridden, and which have failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.storage import StorageWriter

from bytecheckpoint.errors import CheckpointError

__all__ = ["Hooks", "noting_failure"]

F = TypeVar("F", bound=Callable[..., Any])


def noting_failure(hook: F) -> F:
    """Decorates a hook of our writer or reader: the coordinator notes that the call has failed if it raises."""

    @wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            with suppress(CheckpointError):  # there is no save, or it belongs to the parent of this process
                is_writer = isinstance(self, StorageWriter)
                context = self._session.context if is_writer else self._call
                if not context.is_explicit:  # else whoever has stated the call notes how it ends
                    context.note_failure(error, self)
            raise

    return cast(F, run)


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

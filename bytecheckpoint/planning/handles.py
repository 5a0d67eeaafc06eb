# SPDX-License-Identifier: Apache-2.0
"""Handles of objects: they travel through other processes and back, while the objects stay in their own."""

from __future__ import annotations

import itertools
import uuid
import weakref
from typing import Any

from bytecheckpoint.runtime.per_process import PerProcess

__all__ = ["Handle", "handle_of", "object_of"]

Handle = tuple[str, int]
"""A name of the process, and a number there."""

_numbers = itertools.count()
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_process_name = PerProcess(lambda: uuid.uuid4().hex)  # which no other process of the job has


def handle_of(kept: object) -> Handle:
    """Returns a handle by which ``object_of`` finds ``kept``, in this process and as long as somebody holds it."""
    number = next(_numbers)
    _objects[number] = kept
    return _process_name.get(), number


def object_of(handle: Handle) -> Any:
    """Returns the object of a handle; None if nobody holds it any more, and in another process."""
    process, number = handle
    return _objects.get(number) if process == _process_name.get() else None

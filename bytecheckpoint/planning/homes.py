# SPDX-License-Identifier: Apache-2.0
"""Objects that stay in their process while messages that name them travel through others, and back."""

from __future__ import annotations

import itertools
import uuid
import weakref
from typing import Any

from bytecheckpoint.runtime.per_process import PerProcess

__all__ = ["Home", "home_of", "kept_at"]

Home = tuple[str, int]
"""Where an object stayed: a name of the process, and a ticket."""

_tickets = itertools.count()
_staying: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_process_name = PerProcess(lambda: uuid.uuid4().hex)  # which no other process of the job has


def home_of(kept: object) -> Home:
    """Returns an address at which ``kept_at`` finds ``kept``, in this process and as long as somebody holds it."""
    ticket = next(_tickets)
    _staying[ticket] = kept
    return _process_name.get(), ticket


def kept_at(home: Home) -> Any:
    """Returns the object at ``home``; None if nobody holds it any more, and in another process."""
    process, ticket = home
    return _staying.get(ticket) if process == _process_name.get() else None

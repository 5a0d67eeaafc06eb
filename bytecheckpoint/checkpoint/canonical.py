# SPDX-License-Identifier: Apache-2.0
"""The canonical form of objects: the same bytes for the same value, whoever pickled it. Needs no torch."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.native import _core

__all__ = ["canonical", "canonical_record"]

_CONTAINERS: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z", dict: b"d", OrderedDict: b"o"}
_TEXTS: dict[type, bytes] = {bytes: b"b", bytearray: b"B"}
_DICTS = (dict, OrderedDict)


def canonical(value: Any) -> bytes | None:
    """Returns the canonical form of a value of builtin types, and ``OrderedDict``; None if there is another type in it.

    Each value is a letter, and what follows it. docs/internals/digest_form.md has all letters. Dicts keep their order;
    sets, which have none, are sorted by the forms of their elements.
    """
    out: list[bytes] = []
    return b"".join(out) if _append(value, out.append) else None


def canonical_record(fqn: str, record: bytes) -> tuple[bytes, bool]:
    """Returns the canonical form of the value of a record, and True; the record as it is, and False, if it has none.

    Nothing in the record is run.

    Raises:
        CorruptCheckpointError: The record is damaged. The message names the key.
    """
    try:
        value = _core.load_builtin(record) or _core.load_standard(record)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"'{fqn}': {error}") from None
    form = None if value is None else canonical(value[0])
    return (record, False) if form is None else (form, True)


def _append(value: Any, append: Callable[[bytes], object]) -> bool:
    """Appends the form of a value. Returns False if it has none."""
    kind = type(value)
    if value is None or kind is bool:
        append({None: b"N", True: b"T", False: b"F"}[value])
    elif kind is int:
        append(b"i%x;" % value)
    elif kind is float:
        append(b"f" + struct.pack("<d", value))
    elif kind is complex:
        append(b"c" + struct.pack("<dd", value.real, value.imag))
    elif kind is str or kind in _TEXTS:
        content = value.encode("utf-8", "surrogatepass") if kind is str else bytes(value)
        append(b"%s%d:%s" % (_TEXTS.get(kind, b"s"), len(content), content))
    elif kind in _CONTAINERS:
        append(b"%s%d:" % (_CONTAINERS[kind], len(value)))
        return _append_all(value, kind, append)
    else:
        return False
    return True


def _append_all(values: Any, kind: type, append: Callable[[bytes], object]) -> bool:
    if kind in (set, frozenset):
        forms = [canonical(each) for each in values]
        known = sorted(form for form in forms if form is not None)
        append(b"".join(known))
        return len(known) == len(forms)
    children: Iterable[Any] = (part for item in values.items() for part in item) if kind in _DICTS else values
    return all(_append(each, append) for each in children)

# SPDX-License-Identifier: Apache-2.0
"""Which casts keep every value, and which a ``LoadSpec`` allows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.load_spec.spec import LoadSpec

__all__ = ["Cast", "as_dtype", "keeps_values", "refused"]

# A key, its stored dtype, and that of the tensor that it is loaded into.
Cast = tuple[str, str, torch.dtype]


def as_dtype(name: Any) -> torch.dtype:
    """Returns a dtype, which may be given by its name, such as ``bfloat16`` or ``torch.bfloat16``.

    Raises:
        ConfigError: There is no such dtype.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"LoadSpec(cast=...): {name!r} is no dtype of this torch")
    return dtype


@lru_cache(maxsize=1024)
def keeps_values(stored: str, to: torch.dtype) -> bool:
    """Whether ``to`` has every value of the dtype named ``stored``. NaN and infinities do not count."""
    source = getattr(torch, stored, None)
    if source == to:
        return True
    if not isinstance(source, torch.dtype) or (source.is_complex and not to.is_complex):
        return False
    if source == torch.bool:
        return True
    if to == torch.bool:
        return False
    try:
        return _bits(source) <= _bits(to) and _is_in_range(source, to)
    except (TypeError, RuntimeError):  # torch has no limits of this dtype
        return False


def _bits(dtype: torch.dtype) -> float:
    """Returns the number of significant bits: two values next to each other near 1 differ by the last of them."""
    if dtype.is_floating_point or dtype.is_complex:
        return 1 / torch.finfo(dtype).eps
    limits = torch.iinfo(dtype)
    return max(float(limits.max), -float(limits.min)) / 2


def _is_in_range(source: torch.dtype, to: torch.dtype) -> bool:
    is_float = source.is_floating_point or source.is_complex
    into_float = to.is_floating_point or to.is_complex
    if is_float and not into_float:
        return False
    of_source, of_to = (torch.finfo(d) if f else torch.iinfo(d) for d, f in ((source, is_float), (to, into_float)))
    if of_source.min < of_to.min or of_source.max > of_to.max:
        return False
    if not is_float:
        return True
    smallest = torch.finfo(source).smallest_normal * torch.finfo(source).eps
    return smallest >= torch.finfo(to).smallest_normal * torch.finfo(to).eps


def refused(casts: Sequence[Cast], spec: LoadSpec) -> list[Cast]:
    """Returns the casts that ``spec`` does not allow."""

    def is_allowed(cast: Cast) -> bool:
        key, stored, to = cast
        allowed = spec.dtype_of(key)
        return (
            spec.cast == "any"
            or (spec.cast == "widen" and keeps_values(stored, to))
            or (allowed is not None and as_dtype(allowed) == to)
        )

    return [cast for cast in casts if not is_allowed(cast)]

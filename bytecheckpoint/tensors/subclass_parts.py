# SPDX-License-Identifier: Apache-2.0
"""Tensors of subclasses that describe themselves by ``__tensor_flatten__``, as the plain tensors that they are made of.

A quantized weight is saved as its numbers and its scales, each under a key of its own below the key of the weight,
with a description of the class. So the parts reshard, nothing is pickled, and stock DCP loads them into plain tensors.
A load fills the parts of a tensor of the same class in place.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from bytecheckpoint.errors import InvalidPlanError, KeyMismatchError
from bytecheckpoint.listing import listed
from bytecheckpoint.tensors.chunks import LocalChunks
from bytecheckpoint.tensors.dtensor_pieces import refuse_pieces
from bytecheckpoint.tensors.subclass_context import NotPlainError, plain_context

__all__ = [
    "DESCRIPTION",
    "StoredKeys",
    "nested_parts",
    "parts_of",
    "plain_tensors_in",
    "with_parts",
    "with_stored_parts",
]

# The last part of the key of a description.
DESCRIPTION = "__subclass__"

Path = tuple[str, ...]  # names of attributes, from the outermost tensor on
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def parts_of(value: Any, key: str) -> dict[Path, Any] | None:
    """Returns the parts of a tensor and its description, by what is added to its key.

    A part is a plain tensor, a DTensor, or a ``LocalChunks`` if this rank has a shard of it. All share the memory of
    the tensor.

    Args:
        value: Any tensor.
        key: Its key, for messages.

    Returns:
        None if the tensor is to be taken as it is: it does not describe itself, or not by plain tensors and plain
        values, or its shards cannot be told from those of its parts. Empty if this rank holds no element of it.

    Raises:
        InvalidPlanError: The shard of this rank ends within a block of a part.
    """
    sharded = value if type(value) is DTensor else None
    tensor = _local(value)
    taken_apart = _taken_apart(tensor)
    if taken_apart is None:
        return None
    parts, description = taken_apart
    chunks = None if sharded is None else _sharded_parts(sharded, tensor, parts, key)
    if sharded is not None:
        if not chunks:
            return chunks
        parts = chunks
    return {**parts, (DESCRIPTION,): json.dumps(description)}


def nested_parts(value: Any, key: str) -> dict[str, Any] | None:
    """Returns the parts in nested dicts, which have the same keys when they are flattened; None as ``parts_of``."""
    parts = parts_of(value, key)
    if parts is None:
        return None
    nested: dict[str, Any] = {}
    for (*outer, last), part in parts.items():
        below = nested
        for name in outer:
            below = below.setdefault(name, {})
        below[last] = part
    return nested


def with_parts(
    flat: dict[str, Any],
    mappings: dict[str, Any],
    keys: Collection[str],
    wants: Callable[[str, Sequence[str]], Sequence[str] | None] = lambda key, names: names,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Replaces tensors of a flat state by their parts.

    Args:
        flat: Values by key; not changed.
        mappings: Paths by key; not changed.
        keys: Keys of tensors that may have parts.
        wants: Function from a key and the keys of its parts to those that are wanted; None leaves the tensor whole.

    Returns:
        Values and paths, and the descriptions by key. A description is JSON text, because a dict would be flattened.

    Raises:
        InvalidPlanError: A part would get a key that the state already has; or see ``parts_of``.
    """
    descriptions: dict[str, Any] = {}
    flat, mappings = dict(flat), dict(mappings)
    for key in keys:
        parts = parts_of(flat[key], key) if key in flat else None
        if parts is None:
            continue
        named = {f"{key}.{'.'.join(path)}": (path, part) for path, part in parts.items()}
        wanted = wants(key, [*named])
        if wanted is None:
            continue
        del flat[key]
        outer = mappings.pop(key, (key,))
        for below in wanted:
            path, part = named[below]
            if below in flat:
                raise InvalidPlanError(
                    f"'{below}': the state has this key, and '{key}' has a part of this name; "
                    "give one of them another key"
                )
            flat[below], mappings[below] = part, (*outer, *path)
            if path == (DESCRIPTION,):
                descriptions[below] = part
    return flat, mappings, descriptions


def with_stored_parts(
    flat: dict[str, Any], mappings: dict[str, Any], keys: Collection[str], stored: StoredKeys
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Replaces tensors of a flat state by their parts, where a checkpoint has these.

    A tensor stays whole if the checkpoint has it whole, or nothing of it. A description is left out if none is stored.

    Args:
        flat: See ``with_parts``.
        mappings: See ``with_parts``.
        keys: See ``with_parts``.
        stored: The keys of the checkpoint.

    Returns:
        See ``with_parts``.

    Raises:
        KeyMismatchError: A tensor lacks a part that is stored, or has one that is not. Its other parts alone would give
            wrong values, so this does not depend on how strict the load is.
        InvalidPlanError: See ``with_parts``.
    """
    lacking: list[str] = []

    def wants(key: str, names: Sequence[str]) -> Sequence[str] | None:
        if stored.has(key) or (names and not any(map(stored.has, names))):
            return None
        wanted = [name for name in names if stored.has(name) or not name.endswith(f".{DESCRIPTION}")]
        if wanted:  # else this rank holds no element of the tensor
            others = [name for name in stored.below(key) if name not in names and name not in flat]
            kind = type(_local(flat[key])).__name__
            lacking.extend(f"'{name}' is stored, and the {kind} to fill has no such part" for name in others)
            absent = (name for name in wanted if not stored.has(name))
            lacking.extend(f"the {kind} to fill has the part '{name}', which is not stored" for name in absent)
        return wanted

    of_parts = with_parts(flat, mappings, keys, wants)
    if lacking:
        raise KeyMismatchError(
            f"tensors of subclasses were saved with other parts than those to fill have: {listed(lacking)}. Without "
            "all of its parts a tensor has wrong values: make these tensors as they were when they were saved"
        )
    return of_parts


class StoredKeys:
    """The keys of a checkpoint, and which of them are below a key.

    Args:
        has: Whether the checkpoint has a key.
        names: Returns all keys.
    """

    def __init__(self, has: Callable[[str], bool], names: Callable[[], Collection[str]]) -> None:
        self.has = has
        self._names = names
        self._sorted: list[str] | None = None

    def below(self, key: str) -> list[str]:
        """Returns the keys that begin with ``key`` and a dot."""
        if self._sorted is None:
            self._sorted = sorted(self._names())
        begin = bisect.bisect_left(self._sorted, f"{key}.")
        end = begin
        while end < len(self._sorted) and self._sorted[end].startswith(f"{key}."):
            end += 1
        return self._sorted[begin:end]


def _local(value: Any) -> Any:
    if type(value) is not DTensor:
        return value
    with torch.no_grad():
        return value.to_local()


def _taken_apart(tensor: torch.Tensor) -> tuple[dict[Path, torch.Tensor], dict[str, Any]] | None:
    """Returns the plain tensors in a tensor, and its description; None if it has none, or not only such."""
    kind = type(tensor)
    is_known = kind in _PLAIN or isinstance(tensor, DTensor | LocalChunks | ShardedTensor)
    if is_known or kind.__name__ == "AsyncCollectiveTensor" or not hasattr(kind, "__tensor_flatten__"):
        return None
    if tensor.is_nested:
        return None
    flattened: Any = tensor
    names, context = flattened.__tensor_flatten__()
    parts: dict[Path, torch.Tensor] = {}
    inner: dict[str, Any] = {}
    for name in names:
        part: Any = getattr(tensor, name, None)
        is_kept = getattr(tensor, name, None) is part  # else it is made anew each time, and cannot be filled
        if not (isinstance(part, torch.Tensor) and is_kept) or name == DESCRIPTION or "." in name:
            return None
        if type(part) is DTensor or (type(part) in _PLAIN and part.layout == torch.strided and not part.is_quantized):
            parts[name,] = part.detach()
            continue
        below = _taken_apart(part)
        if below is None:
            return None
        parts.update({(name, *path): plain for path, plain in below[0].items()})
        inner[name] = below[1]
    try:
        plain = plain_context(context)
    except NotPlainError:
        return None
    described = {"class": kind.__qualname__, "module": kind.__module__, "shape": [*tensor.shape], "context": plain}
    return parts, {**described, "parts": [*names], "inner": inner}


def plain_tensors_in(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors whose memory a tensor has: itself, or those within it as far as its class names them."""
    kind = type(tensor)
    if kind in _PLAIN:
        yield tensor
    elif kind is DTensor:
        yield from plain_tensors_in(_local(tensor))
    elif hasattr(kind, "__tensor_flatten__"):
        within: Any = tensor
        for name in within.__tensor_flatten__()[0]:
            part = getattr(tensor, name, None)
            if isinstance(part, torch.Tensor):
                yield from plain_tensors_in(part)


def _sharded_parts(
    sharded: DTensor, local: torch.Tensor, parts: Mapping[Path, torch.Tensor], key: str
) -> dict[Path, Any] | None:
    """Returns which box of each whole part this rank holds; None and empty as ``parts_of``."""
    if sharded.device_mesh.get_coordinate() is None:
        return {}
    if not all(placement.is_shard() or placement.is_replicate() for placement in sharded.placements):
        return None
    refuse_pieces({key: sharded})
    described: Any = sharded
    (chunk,) = described.__create_chunk_list__()
    if chunk.sizes != local.shape or any(type(part) not in _PLAIN for part in parts.values()):
        return None
    cut = [dim for dim, size in enumerate(chunk.sizes) if size != sharded.shape[dim]]
    if not cut:
        return dict(parts)
    if local.numel() == 0:
        return {}
    follows = [_followers(local, parts, dim) for dim in cut]
    chunks: dict[Path, Any] = {}
    for path, part in parts.items():
        shape, begin, is_copy = [*part.shape], [0] * part.ndim, False
        for dim, of_dim in zip(cut, follows, strict=True):
            if of_dim is None:
                return None
            at = of_dim[path]
            if at is None:
                is_copy = True
                continue
            if begin[at] or shape[at] != part.shape[at]:
                return None  # two dims of the tensor are one dim of the part
            whole, left = divmod(part.shape[at] * sharded.shape[dim], chunk.sizes[dim])
            begin[at], left_before = divmod(part.shape[at] * chunk.offsets[dim], chunk.sizes[dim])
            if left or left_before:
                raise InvalidPlanError(
                    f"'{key}': a {type(local).__name__} of {[*sharded.shape]}, of which this rank holds "
                    f"{[*chunk.sizes]} at {[*chunk.offsets]}, keeps {[*part.shape]} of '{'.'.join(path)}': the shard "
                    "ends within a block. Shard it at whole blocks; or Config(tensor_subclasses='opaque') saves each "
                    "shard whole"
                )
            shape[at] = whole
        ranks = sharded.device_mesh.mesh.flatten().tolist()
        chunks[path] = LocalChunks(shape, [begin], [part], part.dtype, must_agree=is_copy, ranks=ranks)
    return chunks


def _followers(local: torch.Tensor, parts: Mapping[Path, torch.Tensor], dim: int) -> dict[Path, int | None] | None:
    """Returns for each part which dim of it follows dim ``dim`` of the tensor; None for a part that stays as it is.

    A shorter slice of the tensor says so. If the class cannot be sliced, shapes say so where they leave no doubt; else
    the result is None.
    """
    size = local.shape[dim]
    # Half of it, or a power of two, because some classes are cut at whole blocks only. Nothing, if it is 1.
    for count in dict.fromkeys((size // 2, 1 << (size - 1).bit_length() - 1 if size > 1 else 0)):
        shorter = _slice(local, dim, count)
        if shorter is None or shorter.keys() != parts.keys():
            continue
        changed = {path: _changed_dims(part, shorter[path]) for path, part in parts.items()}
        if any(dims is None or len(dims) > 1 for dims in changed.values()):
            return None
        return {path: next(iter(dims or ()), None) for path, dims in changed.items()}
    follows: dict[Path, int | None] = {}
    for path, part in parts.items():
        if part.ndim == local.ndim and part.shape[dim] == size:
            follows[path] = dim
        elif part.numel() == 1 or (part.ndim == local.ndim and part.shape[dim] == 1):
            follows[path] = None
        else:
            return None
    return follows


def _slice(local: torch.Tensor, dim: int, count: int) -> dict[Path, torch.Tensor] | None:
    try:
        with torch.no_grad():
            taken_apart = _taken_apart(local.narrow(dim, 0, count))
    except Exception:  # a class may raise anything for what it does not support
        return None
    return None if taken_apart is None else taken_apart[0]


def _changed_dims(part: torch.Tensor, shorter: torch.Tensor) -> list[int] | None:
    if part.ndim != shorter.ndim:
        return None
    return [dim for dim, (a, b) in enumerate(zip(part.shape, shorter.shape, strict=True)) if a != b]

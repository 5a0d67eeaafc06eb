# SPDX-License-Identifier: Apache-2.0
"""DTensors of which a rank holds other boxes than the one that DCP computes from their placements.

DCP applies the placements from left to right and takes the first element that a rank gets in each dim for the begin of
one box. That is wrong for three kinds of DTensors:

- The spec says that another axis of the mesh shards a dim first (``shard_order``): the box is elsewhere.
- Torch has flattened a DTensor that was sharded by columns, by ``reshape`` or ``view``: the rank holds a piece of every
  row, which torch calls a ``_StridedShard``.
- The mesh has its ranks in another order than its process groups, which are sorted by rank, as ``[2, 0, 3, 1]``. Where
  DCP takes the place of the rank in the mesh, torch's collectives, and so ``full_tensor()`` and every forward pass,
  take its place in the group: the box is elsewhere, and two replicas may have different ones.

For a save or load such a DTensor becomes a ``LocalChunks`` of views of its local tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _C
from bytecheckpoint.tensors.chunks import LocalChunks

__all__ = ["Piece", "is_in_order", "pieces_of", "refuse_pieces", "with_pieces"]

# More pieces on one rank would make the metadata larger than the elements are worth.
_MOST_PIECES = 1 << 16

_ADVICE = "redistribute it first, or give the tensor from which it was made"

_OUT_OF_ORDER = (
    "its mesh {} has the ranks in another order than their process groups, so torch's own functions do not agree on "
    "its parts; make a mesh whose ranks ascend along each axis, or sizes that divide"
)

# Indices of one dim that a rank holds, as (begin, length), in the order in which its local tensor has them.
Runs = list[tuple[int, int]]


class Piece(NamedTuple):
    """A box of a DTensor.

    Attributes:
        offsets: Where it begins in the whole tensor.
        begins: Where it begins in the local tensor.
        sizes: Its sizes.
    """

    offsets: tuple[int, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Returns the index by which the local tensor gives a view of the piece."""
        return tuple(slice(at, at + size) for at, size in zip(self.begins, self.sizes, strict=True))


class _Split(NamedTuple):
    """One axis of the mesh shards one dim of the tensor.

    Attributes:
        dim: The dim.
        axis: The axis.
        factor: Number of blocks of the dim of which each rank gets a part. It is 1 for ``Shard``.
    """

    dim: int
    axis: int
    factor: int


def with_pieces(flat: Mapping[str, Any], *, from_dcp: bool = False) -> dict[str, Any]:
    """Returns a flat state in which DTensors of other boxes than DCP's are ``LocalChunks`` of the same memory.

    Args:
        flat: Flat state.
        from_dcp: Whether it is to be filled from a checkpoint that DCP wrote. Of a mesh that is not in order, that may
            have the rows of each rank in the places of others, which only another load into the same mesh undoes.

    Raises:
        InvalidPlanError: The boxes of a DTensor are not known, or are too many. The message names its key.
    """
    state = flat if type(flat) is dict else dict(flat)
    found = _find(state)
    if not found:
        return state
    state = dict(state)
    for key, pieces in found.items():
        dtensor = state[key]
        if from_dcp and not is_in_order(dtensor.device_mesh):
            raise InvalidPlanError(
                f"'{key}': its mesh {dtensor.device_mesh} has the ranks in another order than their process groups, "
                "and DCP wrote the checkpoint: what it saved from such a mesh has rows in wrong places, which only its "
                "own reader puts back, and only into the same mesh. Load it with dcp.load and DCP's FileSystemReader "
                "into the mesh that saved it, and save it again; or make a mesh whose ranks ascend along each axis"
            )
        local = dtensor.to_local().detach()
        if type(local) is not torch.Tensor or local.layout != torch.strided or local.is_quantized:
            _refuse(key, local)
        views = [local[piece.slices()] for piece in pieces]
        state[key] = LocalChunks(dtensor.shape, [piece.offsets for piece in pieces], views, dtensor.dtype)
    return state


def refuse_pieces(flat: Mapping[str, Any], keys: Iterable[str] | None = None) -> None:
    """Raises if DCP's boxes of a DTensor are wrong, where nobody can put others in their place.

    Args:
        flat: Flat state.
        keys: Keys to look at; None: all.

    Raises:
        InvalidPlanError: There is such a DTensor. The message names its key.
    """
    state = dict(flat) if keys is None else {key: flat[key] for key in keys if key in flat}
    for key in _find(state):
        _refuse(key, state[key].to_local())


def _find(flat: dict[str, Any]) -> dict[str, Any]:
    return _C.find_pieces(flat, order_of, pieces_of, is_in_order)


def is_in_order(mesh: DeviceMesh) -> bool:
    """Whether this rank stands in the process groups of a mesh where it stands in the mesh."""
    coordinate = mesh.get_coordinate()
    return coordinate is None or [*coordinate] == _places_in_groups(mesh, coordinate)


def _places_in_groups(mesh: DeviceMesh, coordinate: Sequence[int]) -> list[int]:
    """Returns for each axis the place of this rank in the process group of its row.

    Raises:
        ValueError: Its groups are gone, and the ranks do not ascend, so that only the groups could say it.
    """
    rows = [
        mesh.mesh[tuple(slice(None) if other == axis else at for other, at in enumerate(coordinate))].tolist()
        for axis in range(mesh.ndim)
    ]
    if all(row == sorted(row) for row in rows):
        return [*coordinate]  # groups are sorted, too, and may be gone when a save in the background asks
    try:
        return [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    except RuntimeError as error:
        if "not initialized" in str(error):
            return [*coordinate]  # a mesh without groups, as of a simulation: no collective takes its parts elsewhere
        raise ValueError(
            f"the process groups of its mesh {mesh} are gone, which say in which order its ranks have their parts: "
            "destroy them when the save has ended, or make a mesh whose ranks ascend along each axis"
        ) from error


def _refuse(key: str, local: object) -> None:
    raise InvalidPlanError(
        f"'{key}': a DTensor of which this rank holds several pieces, or whose dims are not sharded by the axes of its "
        "mesh from left to right, or by ranks in another order than that of their process groups, can be saved and "
        "loaded with our planners only, and only if its local tensor is a plain tensor, not a "
        f"{type(local).__name__}; {_ADVICE}"
    )


def order_of(dtensor: DTensor) -> Any:
    """Returns in which order the axes of the mesh shard each dim; None if it is from left to right.

    An AttributeError means that this torch keeps it elsewhere. Then nobody may guess it.
    """
    spec: Any = dtensor._spec
    return spec.shard_order


def pieces_of(dtensor: DTensor) -> list[Piece] | None:
    """Returns the boxes that this rank holds; None if it is the one that DCP computes, or if DCP refuses the DTensor.

    Raises:
        ValueError: They are not known, or are too many.
    """
    with torch.no_grad():
        local: Any = dtensor.to_local()
    coordinate = dtensor.device_mesh.get_coordinate()
    is_partial = any(placement.is_partial() for placement in dtensor.placements)
    if coordinate is None or is_partial or dtensor.numel() == 0 or hasattr(local, "__create_chunk_list__"):
        return None
    from_left = [*_splits(dtensor)]
    ordered = _in_order(from_left, order_of(dtensor))
    shape, mesh_shape = [*dtensor.shape], [*dtensor.device_mesh.shape]
    places = _places_in_groups(dtensor.device_mesh, coordinate)
    runs = _runs(shape, mesh_shape, places, ordered)
    sizes = [_length(of_dim) for of_dim in runs]
    if sizes != [*local.shape]:
        advice = f": {_OUT_OF_ORDER.format(dtensor.device_mesh)}" if places != [*coordinate] else ""
        raise ValueError(
            f"its placements {dtensor.placements} give this rank {sizes} of {shape}, but its local tensor is of "
            f"{[*local.shape]}{advice}"
        )
    is_empty = 0 in sizes
    if all(len(of_dim) <= 1 for of_dim in runs):
        is_theirs = ordered == from_left and places == [*coordinate]
        theirs = runs if is_theirs else _runs(shape, mesh_shape, coordinate, from_left)
        if theirs == runs or (is_empty and [_length(of_dim) for of_dim in theirs] == sizes):
            return None
    if is_empty:
        return []
    num_pieces = math.prod(map(len, runs))
    if num_pieces > _MOST_PIECES:
        raise ValueError(f"this rank holds it in {num_pieces:,} pieces, more than {_MOST_PIECES:,}; {_ADVICE}")
    return [_piece(runs_of_piece) for runs_of_piece in itertools.product(*map(_located, runs))]


def _splits(dtensor: DTensor) -> Iterable[_Split]:
    for axis, placement in enumerate(dtensor.placements):
        kind = type(placement)
        if kind is Replicate:
            continue
        is_strided = hasattr(placement, "split_factor") and kind.__module__.startswith("torch.distributed.tensor")
        if kind is not Shard and not is_strided:
            raise ValueError(f"it is not known which elements a placement of class {kind.__qualname__} gives a rank")
        shard: Any = placement
        yield _Split(shard.dim % dtensor.ndim, axis, int(getattr(placement, "split_factor", 1)))


def _in_order(splits: list[_Split], order: Any) -> list[_Split]:
    """Returns the splits in the order in which they were made.

    Strided splits say by their factor what other axes have done before them, so they always go from left to right.

    Raises:
        ValueError: The order is one of other axes.
    """
    if not order or any(split.factor != 1 for split in splits):
        return splits
    of_axis = {split.axis: split for split in splits}
    ordered = [of_axis.get(axis) for entry in order for axis in entry.mesh_dims]
    if sorted(split.axis for split in ordered if split is not None) != sorted(of_axis) or None in ordered:
        raise ValueError(f"its shard_order {order} does not fit its placements")
    # Axes of different dims do not disturb each other.
    return sorted((split for split in ordered if split is not None), key=lambda split: split.dim)


def _runs(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], splits: Iterable[_Split]
) -> list[Runs]:
    runs: list[Runs] = [[(0, size)] if size else [] for size in shape]
    for dim, axis, factor in splits:
        length = _length(runs[dim])
        parts: Runs = []
        for begin, end in _chunks(length, factor):
            of_block = _chunks(end - begin, mesh_shape[axis])[coordinate[axis]]
            parts += _between(runs[dim], begin + of_block[0], begin + of_block[1])
        runs[dim] = _joined(parts)
    return runs


def _chunks(length: int, count: int) -> list[tuple[int, int]]:
    """Returns begin and end of each part, divided as ``torch.chunk`` does it, and empty ones up to ``count``."""
    size = -(-length // count)
    return [(min(size * i, length), min(size * (i + 1), length)) for i in range(count)]


def _length(runs: Runs) -> int:
    return sum(length for _, length in runs)


def _between(runs: Runs, begin: int, end: int) -> Runs:
    """Returns what of the runs, one behind the other, is from position ``begin`` to ``end``."""
    found: Runs = []
    at = 0
    for first, length in runs:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            found.append((first + low - at, high - low))
        at += length
    return found


def _joined(runs: Runs) -> Runs:
    joined: Runs = []
    for begin, length in runs:
        if joined and sum(joined[-1]) == begin:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((begin, length))
    return joined


def _located(runs: Runs) -> list[tuple[int, int, int]]:
    """Returns for each run where it begins in the whole tensor and in the local one, and its length."""
    begins = itertools.accumulate((length for _, length in runs), initial=0)
    return [(first, begin, length) for (first, length), begin in zip(runs, begins, strict=False)]


def _piece(runs: Sequence[tuple[int, int, int]]) -> Piece:
    offsets, begins, sizes = zip(*runs, strict=True)
    return Piece(offsets, begins, sizes)

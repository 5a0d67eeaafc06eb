# SPDX-License-Identifier: Apache-2.0
"""Makes state dicts of several ranks in one process, without a process group, and draws their layouts.

A ``DeviceMesh`` asks for its rank once, when it is made. If it gets the rank that we want there, it makes DTensors that
are as real as those of a job: torch computes where their shards lie. ``Layout.box_of`` is our own computation, and
decides what a shard is filled with. If the two disagree, elements land in wrong places.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed.device_mesh as device_mesh
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["Box", "Layout", "Spec", "World", "full", "layouts", "specs", "state_of", "worlds"]


class Box(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def selection(self) -> Any:
        """Returns an index for a tensor or an array. It selects a view, also if there are no dims."""
        return (*(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True)), ...)

    def is_in(self, other: Box) -> bool:
        mine, theirs = zip(*self, strict=True), zip(*other, strict=True)
        return all(a >= b and a + m <= b + n for (a, m), (b, n) in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over ranks.

    Attributes:
        ranks: The ranks that have the tensor; row-major over the mesh if there is one.
        axes: Sizes of the mesh axes; None for a plain tensor, which each of ``ranks`` has whole.
        placements: One for each axis.
        tells_all: Whether ranks outside of the mesh have the DTensor, too, with nothing in it.
    """

    ranks: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    placements: tuple[Placement, ...] = ()
    tells_all: bool = False

    def box_of(self, rank: int, shape: tuple[int, ...]) -> Box | None:
        """Returns what ``rank`` holds of a tensor; None if it is not one of ``ranks``."""
        if rank not in self.ranks:
            return None
        offsets, sizes = [0] * len(shape), list(shape)
        if self.axes is not None:
            coordinate = np.unravel_index(self.ranks.index(rank), self.axes)
            for axis in self._order():
                placement = self.placements[axis]
                if not isinstance(placement, Shard | _StridedShard):
                    continue
                dim = placement.dim
                begin, end = _chunk(sizes[dim], self.axes[axis], int(coordinate[axis]))
                offsets[dim] = offsets[dim] + begin if begin < end else shape[dim]
                sizes[dim] = end - begin
        return Box(tuple(offsets), tuple(sizes))

    def _order(self) -> list[int]:
        # A strided axis divides what the axes behind it (tensor parallelism) have left.
        axes = range(len(self.placements))
        return sorted(axes, key=lambda axis: isinstance(self.placements[axis], _StridedShard))


def _chunk(size: int, num: int, position: int) -> tuple[int, int]:
    """Returns one chunk as ``torch.chunk`` cuts: all have the same size except the last, and empty ones follow it."""
    most = -(-size // num)
    begin = min(most * position, size)
    return begin, min(begin + most, size)


@dataclass(frozen=True)
class Spec:
    """Describes a tensor, or an object if ``dtype`` is None."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class World:
    """Describes what the ranks have, by FQN."""

    num_ranks: int
    specs: dict[str, Spec]
    layouts: dict[str, Layout] = field(default_factory=dict)

    def box_of(self, fqn: str, rank: int) -> Box | None:
        return self.layouts[fqn].box_of(rank, self.specs[fqn].shape)

    def tensors(self) -> Iterator[tuple[str, Spec]]:
        return ((fqn, spec) for fqn, spec in self.specs.items() if spec.dtype is not None)

    def objects(self) -> Iterator[str]:
        return (fqn for fqn, spec in self.specs.items() if spec.dtype is None)


def full(fqn: str, spec: Spec, *, inverted: bool = False) -> torch.Tensor:
    """Returns the whole tensor: random bytes that depend on the name, with every bit inverted if ``inverted``."""
    assert spec.dtype is not None
    if not spec.num_bytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    data = np.frombuffer(np.random.default_rng(zlib.crc32(fqn.encode())).bytes(spec.num_bytes), np.uint8)
    return torch.from_numpy(~data if inverted else data.copy()).view(spec.dtype).reshape(spec.shape)


def state_of(world: World, rank: int, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict of ``rank``, nested at the dots of the names.

    Args:
        values: Objects and whole tensors. The rank gets views of the tensors.
    """
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], device_mesh.DeviceMesh] = {}
    state: dict[str, Any] = {}
    for fqn in world.specs:
        layout, box = world.layouts[fqn], world.box_of(fqn, rank)
        value = values[fqn]
        if layout.axes is not None:
            if box is None and not layout.tells_all:
                continue
            key = (layout.ranks, layout.axes)
            if key not in meshes:
                meshes[key] = _mesh(*key, rank)
            # Shape (0,), as torch has it where a rank holds nothing.
            local = value[box.selection()] if box is not None else value.new_empty(0)
            value = DTensor.from_local(
                local, meshes[key], layout.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        elif box is None:
            continue
        *way, name = fqn.split(".")
        inner = state
        for key_of in way:
            inner = inner.setdefault(key_of, {})
        inner[name] = value
    return state


def _mesh(ranks: tuple[int, ...], axes: tuple[int, ...], rank: int) -> device_mesh.DeviceMesh:
    with mock.patch.object(device_mesh, "get_rank", return_value=rank):
        return device_mesh.DeviceMesh("cpu", torch.tensor(ranks).reshape(axes), _init_backend=False)


_DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Draws scalars, empty tensors, small ones, and ones that are large enough to be split; one in six is an object."""
    kind = draw(st.sampled_from(["object", "small", "small", "small", "large", "large"]))
    if kind == "object":
        return Spec()
    if kind == "small":
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 24]), max_size=3))
        return Spec(tuple(shape), draw(st.sampled_from(_DTYPES)))
    row = draw(st.sampled_from([1, 16, 1000, 4096]))
    rows = draw(st.integers(8, 32)) * max(1, 1024 // row)
    return Spec((rows, row), draw(st.sampled_from(_DTYPES[1:])))


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int, spec: Spec) -> Layout:
    """Draws a plain layout, or one on a mesh of up to three axes; sometimes only of some ranks, in any order."""
    in_order = list(range(num_ranks))
    any_order: list[int] = draw(st.permutations(in_order))
    ranks = draw(st.sampled_from([in_order, any_order]))
    if spec.dtype is None or draw(st.integers(0, 3)) == 0:
        of_some = draw(st.integers(1, num_ranks))
        return Layout(tuple(ranks[: draw(st.sampled_from([num_ranks, num_ranks, of_some]))]))
    axes: list[int] = []
    left = num_ranks
    for _ in range(draw(st.sampled_from([1, 2, 2, 3]))):
        axes.append(draw(st.integers(1, left)))
        left //= axes[-1]
    dims = range(len(spec.shape))
    placements: list[Placement] = [draw(st.sampled_from([Replicate(), *(Shard(dim) for dim in dims)])) for _ in axes]
    even = [dim for dim in dims if len(axes) == 2 and spec.shape[dim] % math.prod(axes) == 0]
    strided = draw(st.sampled_from([None, *even]))
    if strided is not None:
        # FSDP over tensor parallelism. If they are uneven, torch's own shards are not boxes.
        placements = [_StridedShard(strided, split_factor=axes[1]), Shard(strided)]
    # If there are no dims, DTensor.from_local takes the shape of the local tensor.
    tells_all = bool(spec.shape) and draw(st.booleans())
    return Layout(tuple(ranks[: math.prod(axes)]), tuple(axes), tuple(placements), tells_all)


@st.composite
def worlds(draw: st.DrawFn, specs_of: dict[str, Spec] | None = None) -> World:
    """Draws a world of up to 16 ranks.

    Args:
        specs_of: The ``specs`` of another world, to draw one with the same contents.
    """
    if specs_of is None:
        drawn = draw(st.lists(specs(), min_size=1, max_size=6))
        specs_of = {f"{'model' if spec.dtype else 'extra'}.{i}": spec for i, spec in enumerate(drawn)}
    num_ranks = draw(st.sampled_from([2, 1, *range(3, 17)]))  # st.integers would draw 1 every third time
    return World(num_ranks, specs_of, {fqn: draw(layouts(num_ranks, spec)) for fqn, spec in specs_of.items()})

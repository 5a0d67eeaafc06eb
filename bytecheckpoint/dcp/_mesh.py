# SPDX-License-Identifier: Apache-2.0
"""The device mesh of a state, for reports: which axes the ranks have."""

from __future__ import annotations

import itertools
from typing import Any

from torch.distributed.tensor import DTensor

__all__ = ["mesh_of"]

# A state with DTensors has one among its first values; all of a large state is not worth a look.
_MOST_LOOKED_AT = 1000


def mesh_of(planner: Any, num_ranks: int) -> tuple[tuple[str, int], ...]:
    """Returns name and size of each axis of the mesh that the ranks of a call are arranged in, as far as it shows.

    Args:
        planner: Planner of the call; its state dict is looked at.
        num_ranks: Number of ranks of the call.

    Returns:
        The axes of the first DTensor whose mesh has all ranks, in their order; empty if there is none.
    """
    state = getattr(planner, "state_dict", None)
    values = itertools.islice(state.values(), _MOST_LOOKED_AT) if isinstance(state, dict) else ()
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    for mesh in meshes.values():
        if mesh.size() == num_ranks and mesh.mesh.flatten().tolist() == [*range(num_ranks)]:
            names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.ndim)]
            return tuple(zip(names, mesh.shape, strict=True))
    return ()
